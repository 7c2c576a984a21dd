"""Have the kernel signal a process of the job."""

import fcntl
import os

from attempt import FACTS, attempted

with attempted() as through:
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, FACTS["victim"])
    through("it owns the descriptor")
