"""Take away the permissions of the job's file."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    os.chmod(FACTS["own"], 0o644)
    through("changed")
