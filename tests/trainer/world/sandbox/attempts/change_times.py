"""Change the times of the job's file."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    os.utime(FACTS["own"], (1, 1))
    through("changed")
