"""Start a process in a user namespace by clone3."""

import ctypes
import os
import struct

from attempt import attempted, system_call

with attempted() as through:
    arguments = ctypes.create_string_buffer(struct.pack("11Q", 0x10000000, *[0] * 3, 17, *[0] * 6))
    if system_call("clone3", arguments, 88) == 0:
        os._exit(0)
    through("started")
