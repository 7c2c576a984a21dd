"""Set a limit of a process of the job."""

import resource

from attempt import FACTS, attempted

with attempted() as through:
    resource.prlimit(FACTS["victim"], resource.RLIMIT_CORE, (0, 0))
    through("set")
