"""Find descriptors that the program was not given."""

import os

from attempt import attempted

with attempted() as through:
    found = []
    for descriptor in range(3, 1024):
        try:
            os.fstat(descriptor)
        except OSError:
            continue
        found.append(descriptor)
    if not found:
        raise KeyError
    through(str(found))
