"""Make folders so deep that they can't be deleted by their path."""

import os

from attempt import attempted

with attempted() as through:
    for _ in range(100):
        os.mkdir("d" * 100)
        os.chdir("d" * 100)
    os.mkdir("closed", 0)
    raise KeyError
