"""Load a program into the kernel."""

import ctypes
import struct

from attempt import attempted, system_call

with attempted() as through:
    one_number = struct.pack("4I", 2, 4, 4, 1) + bytes(112)
    system_call("bpf", 0, ctypes.create_string_buffer(one_number), 128)
    through("a map was made")
