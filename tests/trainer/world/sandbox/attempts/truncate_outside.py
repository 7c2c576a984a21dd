"""Cut off a file that everybody may write to."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    os.truncate(FACTS["writable"], 0)
    through("cut off")
