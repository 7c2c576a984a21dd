"""Which system calls the keeper and its programs may make: programs for the kernel's seccomp filter, as bytes.

Two filters, one after the other; the kernel takes the stricter answer. The keeper's is a list of what is allowed, for
itself and all that it forks, and is installed once. The program's takes away what only the keeper needs, and looks at
arguments; it is short, for it is installed for every program. Whatever is refused is refused by an error number:
nothing is killed for trying. Calls that are newer than the list, and ``clone3``, whose flags lie in memory that a
filter can't read, "do not exist" (ENOSYS), so that the C library falls back on older ones.

Source: Linux, ``Documentation/userspace-api/seccomp_filter.rst``, ``include/uapi/linux/{seccomp,filter,audit}.h``.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Iterable

from .numbers import AARCH64, X86_64
from .system import MACHINE, PR_SET_NO_NEW_PRIVS, called, prctl

NUMBERS = {"x86_64": X86_64, "aarch64": AARCH64}
AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

FOR_THE_KEEPER = frozenset({
    "unshare", "mount", "umount2", "capset", "seccomp", "landlock_create_ruleset", "landlock_add_rule",
    "landlock_restrict_self", "memfd_create",
})  # fmt: skip
"""What programs may not do and the keeper must: ``memfd_create`` is how it hands over standard input."""
CHANGES_OF_FILES = frozenset({
    "chmod", "fchmod", "fchmodat", "chown", "fchown", "fchownat", "lchown", "utime", "utimes", "utimensat", "futimesat",
})  # fmt: skip
"""Landlock does not look at these: where the program's user owns files outside its folder, it could lock others out."""
SIGNALS = ("kill", "tgkill")
OTHER_SIGNALS = ("tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
NEWEST = 463
"""The last system call that the list's author has looked at; later ones do not exist for programs."""

CLONE_THREAD = 0x00010000
CLONE_REFUSED = 0x7E020000 | 0x00008000 | 0x00002000 | 0x00800000
"""New namespaces of any kind, a sibling in place of a child, traced or untraced children."""
PRCTL_ALLOWED = (1, 3, 15, 16, 0x53564D41)
"""PR_SET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA."""
IOCTL_REFUSED = (0x5412, 0x541C, 0x540E)
"""TIOCSTI and TIOCLINUX (typing into a terminal), TIOCSCTTY (taking one)."""
FCNTL_REFUSED = (8, 15)
"""F_SETOWN and F_SETOWN_EX: whom the kernel signals."""
AF_UNIX, SOCK_STREAM, SOCK_TYPES = 1, 1, 0xF

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in ``struct seccomp_data``; arguments are 8 bytes each, the lower half first on both machines."""

SECCOMP_SET_MODE_FILTER = 1
SECCOMP = {"x86_64": 317, "aarch64": 277}

_Instruction = tuple[int, int, int, int]


class _Filter(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def keeper_filter(machine: str = MACHINE) -> bytes:
    """What the keeper may do, and at most what programs may."""
    numbers = NUMBERS[machine]
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, AUDIT_ARCHITECTURE[machine]),
        _refuse(errno.EPERM),  # 32-bit calls have other numbers
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, NEWEST + 1),
        _refuse(errno.ENOSYS),  # x32 calls are among them: their numbers have bit 30
        *_when(numbers["clone3"], [_refuse(errno.ENOSYS)]),
    ]
    for name in numbers:
        code += _when(numbers[name], [(_RETURN, 0, 0, _ALLOW)])
    return _assembled([*code, _refuse(errno.EPERM)])


def program_filter(*, owner_of_files: bool, alone: int | None, machine: str = MACHINE) -> bytes:
    """What is taken away from one program.

    ``owner_of_files``: files outside its folder belong to its user and are in its sight. ``alone``: its process number,
    where nothing else keeps it from signalling other processes of its user, or finds all that it starts: it may signal
    nobody but itself, and start threads but no processes.
    """
    numbers = NUMBERS[machine]
    refused = FOR_THE_KEEPER | (CHANGES_OF_FILES if owner_of_files else frozenset())
    if alone is not None:
        refused |= {*OTHER_SIGNALS, "fork", "vfork"}
    code: list[_Instruction] = [(_LOAD, 0, 0, _NUMBER)]
    for name in sorted(refused & numbers.keys()):
        code += _when(numbers[name], [_refuse(errno.EPERM)])
    if owner_of_files:
        code += _when(numbers["fchmodat2"], [_refuse(errno.ENOSYS)])
    clone = [_argument(0), (_ANY_BIT, 0, 1, CLONE_REFUSED), _refuse(errno.EPERM)]
    if alone is not None:
        for name in SIGNALS:
            code += _when(numbers[name], [*_only(0, (alone,)), _refuse(errno.EPERM)])
        clone += [(_ANY_BIT, 1, 0, CLONE_THREAD), _refuse(errno.EPERM)]
    code += _when(numbers["clone"], [*clone, (_RETURN, 0, 0, _ALLOW)])
    code += _when(numbers["prctl"], [*_only(0, PRCTL_ALLOWED), _refuse(errno.EPERM)])
    code += _when(numbers["ioctl"], [*_never(1, IOCTL_REFUSED), (_RETURN, 0, 0, _ALLOW)])
    code += _when(numbers["fcntl"], [*_never(1, FCNTL_REFUSED), (_RETURN, 0, 0, _ALLOW)])
    # Of other processes it would change the limits, which ends them.
    code += _when(numbers["prlimit64"], [*_only(0, (0,)), _refuse(errno.EPERM)])
    # No datagrams: those go to any path of a socket, whoever it was paired with.
    stream = [_argument(1), (_AND, 0, 0, SOCK_TYPES), (_EQUAL, 0, 1, SOCK_STREAM), (_RETURN, 0, 0, _ALLOW)]
    unix = [_argument(0), (_EQUAL, 0, len(stream), AF_UNIX), *stream]
    code += _when(numbers["socketpair"], [*unix, _refuse(errno.EPERM)])
    return _assembled([*code, (_RETURN, 0, 0, _ALLOW)])


def install(program: bytes) -> None:
    """Binds the calling process to it, and all that it forks. Raises ``OSError``."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    held = _Filter(len(program) // 8, program)
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(SECCOMP[MACHINE]), SECCOMP_SET_MODE_FILTER, 0, ctypes.byref(held))
    called(result, "seccomp")


def _refuse(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _argument(index: int) -> _Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _when(number: int, code: list[_Instruction]) -> list[_Instruction]:
    """``code``, which must return, for one system call."""
    return [(_EQUAL, 0, len(code), number), *code]


def _only(index: int, values: Iterable[int]) -> list[_Instruction]:
    """Returns for these values of an argument."""
    code = [_argument(index)]
    for value in values:
        code += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return code


def _never(index: int, values: Iterable[int]) -> list[_Instruction]:
    code = [_argument(index)]
    for value in values:
        code += [(_EQUAL, 0, 1, value), _refuse(errno.EPERM)]
    return code


def _assembled(code: list[_Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
