"""Bind itself to a filter that would confuse its children."""

import ctypes
import struct

from attempt import attempted, system_call

with attempted() as through:
    code = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000), 8)
    program = struct.pack("HxxxxxxQ", 1, ctypes.addressof(code))
    system_call("prctl", 38, 1, 0, 0, 0)
    system_call("seccomp", 1, 0, program)
    through("bound")
