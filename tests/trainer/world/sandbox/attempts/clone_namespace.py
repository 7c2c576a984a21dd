"""Start a process in a user namespace by clone."""

import os

from attempt import attempted, system_call

with attempted() as through:
    if system_call("clone", 0x10000000 | 17, 0, 0, 0, 0) == 0:
        os._exit(0)
    through("started")
