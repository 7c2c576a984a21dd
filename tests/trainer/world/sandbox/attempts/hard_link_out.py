"""Read through a hard link to a file outside."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    os.link(FACTS["public"], "link")
    with open("link") as file:
        through(file.read())
