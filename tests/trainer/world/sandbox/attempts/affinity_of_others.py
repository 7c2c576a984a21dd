"""Choose the cores of a process of the job."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    os.sched_setaffinity(FACTS["victim"], os.sched_getaffinity(0))
    through("chosen")
