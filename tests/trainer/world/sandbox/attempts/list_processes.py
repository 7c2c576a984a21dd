"""List the machine's processes."""

import os

from attempt import attempted

with attempted() as through:
    found = sum(name.isdigit() for name in os.listdir("/proc"))
    if not found:
        raise KeyError
    through(f"{found} processes")
