"""Set the clock."""

import time

from attempt import attempted

with attempted() as through:
    time.clock_settime(time.CLOCK_REALTIME, time.time())
    through("set")
