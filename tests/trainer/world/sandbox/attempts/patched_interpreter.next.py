import math
import os
import sys

from attempt import attempted

with attempted() as through:
    if not hasattr(math, "sqrt") or "LEFT" in os.environ or "/left" in sys.path:
        through("it is changed")
    raise KeyError
