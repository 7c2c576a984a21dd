"""Open the standard input of a process of the job."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    os.open(f"/proc/{FACTS['victim']}/fd/0", os.O_RDWR)
    through("opened")
