"""Open files by io_uring, past the filter."""

import ctypes

from attempt import attempted, system_call

with attempted() as through:
    system_call("io_uring_setup", 1, ctypes.create_string_buffer(120))
    through("set up")
