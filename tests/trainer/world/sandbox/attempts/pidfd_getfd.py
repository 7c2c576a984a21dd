"""Take a descriptor of a process of the job."""

import os

from attempt import FACTS, attempted, system_call

with attempted() as through:
    system_call("pidfd_getfd", os.pidfd_open(FACTS["victim"]), 0, 0)
    through("taken")
