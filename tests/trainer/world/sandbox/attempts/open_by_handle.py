"""Open a file by its handle, past all folders."""

import ctypes

from attempt import attempted, system_call

with attempted() as through:
    handle = ctypes.create_string_buffer(b"\x80\0\0\0", 136)
    system_call("name_to_handle_at", -100, b".", handle, ctypes.byref(ctypes.c_int()), 0)
    through("a handle")
