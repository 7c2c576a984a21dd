"""Change a module that later programs import."""

import string

from attempt import attempted

with attempted() as through:
    with open(string.__file__, "a") as file:
        file.write("")
    through("opened for writing")
