"""Lower the priority of a process of the job."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    os.setpriority(os.PRIO_PROCESS, FACTS["victim"], 1)
    through("lowered")
