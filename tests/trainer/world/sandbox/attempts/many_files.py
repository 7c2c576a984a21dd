"""Make files without end."""

import time

from attempt import attempted

with attempted() as through:
    for number in range(2000):
        with open(f"file-{number}", "w"):
            pass
    time.sleep(3)  # files are counted now and then
    through("2,000 files")
