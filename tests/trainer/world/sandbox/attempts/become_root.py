"""Become root."""

import os

from attempt import attempted

with attempted() as through:
    if os.getuid() == 0:
        through("it is")
    os.setuid(0)
    through("became")
