"""Read the memory of a process of the job."""

import ctypes

from attempt import FACTS, attempted, system_call

with attempted() as through:
    buffer = ctypes.create_string_buffer(8)
    local = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    remote = (ctypes.c_size_t * 2)(FACTS["address"], 8)
    system_call("process_vm_readv", FACTS["victim"], local, 1, remote, 1, 0)
    through(repr(buffer.raw))
