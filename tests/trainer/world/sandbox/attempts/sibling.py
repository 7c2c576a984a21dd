"""Start a process that is the worker's and not the program's."""

import os

from attempt import attempted, system_call

with attempted() as through:
    if system_call("clone", 0x8000 | 17, 0, 0, 0, 0) == 0:
        os._exit(0)
    through("started")
