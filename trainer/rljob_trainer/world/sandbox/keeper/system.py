"""System calls that Python's library does not have, by ctypes. Standard library only: this runs inside the sandbox."""

from __future__ import annotations

import ctypes
import os
import platform

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

MACHINE = platform.machine()

CLONE_NEWNS = 0x00020000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPSET = {"x86_64": 126, "aarch64": 91}
LINUX_CAPABILITY_VERSION_3 = 0x20080522


def called(result: int, what: str) -> int:
    """``result``, or ``OSError`` with the calling thread's error number where it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def system_call(what: str, number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """What the system call ``number`` returns. Raises ``OSError``, which names ``what``."""
    return called(_libc.syscall(ctypes.c_long(number), *map(_argument, arguments)), what)


def prctl(option: int, value: int = 0) -> None:
    zero = ctypes.c_ulong(0)
    called(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def unshare(flags: int) -> None:
    called(_libc.unshare(flags), "unshare")


def mount_tmpfs(path: str, size: int, files: int) -> None:
    """An empty file system in memory at ``path``, for ``size`` bytes in so many ``files``, without programs or
    devices."""
    options = f"size={size},nr_inodes={files},mode=700".encode()
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOEXEC)
    called(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options), f"mount at {path}")


def unmount(path: str) -> None:
    called(_libc.umount2(path.encode(), MNT_DETACH), f"unmount {path}")


def drop_capabilities() -> None:
    """Gives up all capabilities of the calling process, for good: it may get no new privileges."""
    zero = ctypes.c_ulong(0)
    called(
        _libc.prctl(PR_CAP_AMBIENT, ctypes.c_ulong(PR_CAP_AMBIENT_CLEAR_ALL), zero, zero, zero), "ambient capabilities"
    )
    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    called(_libc.syscall(ctypes.c_long(CAPSET[MACHINE]), header, none), "capset")


def _argument(value: int | bytes | ctypes.Array[ctypes.c_char] | None) -> object:
    return ctypes.c_long(value) if isinstance(value, int) else value
