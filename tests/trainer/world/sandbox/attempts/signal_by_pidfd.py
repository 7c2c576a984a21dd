"""Signal a process of the job by a descriptor of it."""

import os
import signal

from attempt import FACTS, attempted

with attempted() as through:
    signal.pidfd_send_signal(os.pidfd_open(FACTS["victim"]), 0)
    through("it can be signalled")
