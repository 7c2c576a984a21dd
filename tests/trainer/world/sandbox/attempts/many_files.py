"""Make files without end."""

import time

from attempt import attempted

with attempted() as through:
    for number in range(5000):
        with open(f"file-{number}", "w"):
            pass
    time.sleep(0.5)
    through("5,000 files")
