"""Move a file of the folder out of it."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    with open("mine", "w") as file:
        file.write("mine")
    os.rename("mine", os.path.join(FACTS["outside"], "moved"))
    through("moved")
