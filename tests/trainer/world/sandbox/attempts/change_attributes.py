"""Set an extended attribute of the job's file."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    os.setxattr(FACTS["own"], "user.left", b"left")
    through("set")
