"""Watch the machine by perf_event_open."""

import ctypes
import struct

from attempt import attempted, system_call

with attempted() as through:
    events = ctypes.create_string_buffer(struct.pack("2I", 1, 112) + bytes(104))
    system_call("perf_event_open", events, 0, -1, -1, 0)
    through("opened")
