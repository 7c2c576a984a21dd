"""Signal a process of the job."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    os.kill(FACTS["victim"], 0)
    through("it can be signalled")
