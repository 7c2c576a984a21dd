"""Write a file into a folder that everybody may write to."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    with open(os.path.join(FACTS["outside"], "left"), "w") as file:
        file.write("left")
    through("written")
