"""Write huge files that have no names any more."""

import os
import time

from attempt import attempted

with attempted() as through:
    held = []
    for number in range(64):
        held.append(open(str(number), "wb"))  # noqa: SIM115
        os.unlink(str(number))
        for _ in range(8):
            held[-1].write(bytes(2**20))
        held[-1].flush()
        time.sleep(0.02)
    through("512 MiB")
