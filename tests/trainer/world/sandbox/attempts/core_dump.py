"""Leave a core file behind."""

import resource

from attempt import attempted

with attempted() as through:
    if resource.getrlimit(resource.RLIMIT_CORE) == (0, 0):
        raise KeyError
    through("a crash leaves one")
