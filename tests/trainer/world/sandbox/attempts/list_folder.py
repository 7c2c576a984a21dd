"""List the job's output folder."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    through(str(os.listdir(FACTS["outside"])))
