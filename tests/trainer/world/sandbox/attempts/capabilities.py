"""Have a capability of the kernel's."""

import ctypes
import struct

from attempt import attempted, system_call

with attempted() as through:
    answer = ctypes.create_string_buffer(24)
    system_call("capget", struct.pack("=Ii", 0x20080522, 0), answer)
    if any(struct.unpack("=6I", answer.raw)):
        through(answer.raw.hex())
    raise KeyError
