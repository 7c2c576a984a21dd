"""Delete a file that everybody may delete."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    os.unlink(FACTS["deletable"])
    through("deleted")
