import os
import time

from attempt import attempted

with attempted() as through:
    time.sleep(0.1)
    if os.path.exists("alive"):
        through("it still writes")
    raise KeyError
