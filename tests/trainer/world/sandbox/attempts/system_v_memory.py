"""Leave a System V shared memory segment."""

import ctypes

from attempt import attempted, system_call

with attempted() as through:
    number = system_call("shmget", 0, 4096, 0o1600)
    system_call("shmctl", number, 0, ctypes.c_void_p())
    through("made")
