"""Raise its own limits."""

import resource

from attempt import attempted

with attempted() as through:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    through("raised")
