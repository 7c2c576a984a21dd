"""Read through a symbolic link to a file outside."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    os.symlink(FACTS["public"], "link")
    with open("link") as file:
        through(file.read())
