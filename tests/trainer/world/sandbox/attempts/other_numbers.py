"""Make a system call by its 32-bit number."""

import ctypes
import mmap
import os

from attempt import attempted

with attempted() as through:
    # mov eax, 20 (getpid); int 0x80; ret
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    answer = call()
    if answer < 0:
        raise OSError(-answer, os.strerror(-answer))
    through(f"{answer} is its number")
