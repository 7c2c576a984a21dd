"""Learn the names of files as they are made in the job's output folder."""

import ctypes
import os

from attempt import FACTS, attempted

with attempted() as through:
    libc = ctypes.CDLL(None, use_errno=True)
    watching = libc.inotify_init()
    if watching < 0 or libc.inotify_add_watch(watching, FACTS["outside"].encode(), 0x100) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    through("watched")
