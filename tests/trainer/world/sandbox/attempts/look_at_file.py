"""Learn whether a file of the machine exists, and how large it is."""

import os

from attempt import FACTS, attempted

with attempted() as through:
    through(f"{os.stat(FACTS['public']).st_size} bytes")
