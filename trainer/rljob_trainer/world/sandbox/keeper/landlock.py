"""Landlock by its three system calls: what a process and all that it forks may open, whom it may signal and trace.

Standard library only: this runs inside the sandbox. Source: Linux, ``Documentation/userspace-api/landlock.rst``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterable

from .system import PR_SET_NO_NEW_PRIVS, prctl, system_call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""The same on all machines."""
CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1
LOWEST_DESCRIPTOR = 16
"""Of rule sets: out of the way of those that a program is started with."""

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_OLDEST = (1 << 13) - 1
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""What may be granted for something that is no folder."""

BIND_AND_CONNECT_TCP = 0b11
SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11

OLDEST_ABI = 3
"""Before it, Landlock does not see that a file is cut off (Linux 6.2 has it)."""
SCOPES_ABI = 6
"""From it on, signals and abstract sockets stay within (Linux 6.12)."""


def abi() -> int:
    """The version of the kernel's Landlock; 0: it has none, or it is switched off."""
    try:
        return system_call("Landlock", CREATE_RULESET, None, 0, CREATE_RULESET_VERSION)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES):
            return 0
        raise


def handled(version: int) -> int:
    """All rights to files that the version knows: what no rule grants is refused."""
    return (
        _OLDEST
        | (REFER if version >= 2 else 0)
        | (TRUNCATE if version >= 3 else 0)
        | (IOCTL_DEV if version >= 5 else 0)
    )


def within(version: int) -> int:
    """The rights to a folder of one's own, in which nothing is executed and no devices are made."""
    return handled(version) & ~(EXECUTE | _MAKE_CHAR | _MAKE_SOCK | _MAKE_BLOCK | IOCTL_DEV)


def ruleset(version: int, rules: Iterable[tuple[str, int]]) -> int:
    """A descriptor of what is granted below each path (those that do not exist are left out); nothing else is, nor TCP,
    nor signals, traces and abstract sockets to the outside, as far as the version knows them. Raises ``OSError``."""
    fields = [handled(version)]
    if version >= 4:
        fields.append(BIND_AND_CONNECT_TCP)
    if version >= SCOPES_ABI:
        fields.append(SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    low = system_call("landlock_create_ruleset", CREATE_RULESET, attributes, len(attributes), 0)
    descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, LOWEST_DESCRIPTOR)
    os.close(low)
    for path, rights in rules:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            continue
        granted = rights & handled(version) & (-1 if os.path.isdir(path) else _OF_FILES)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", granted, place), 12)
        system_call("landlock_add_rule", ADD_RULE, descriptor, RULE_PATH_BENEATH, rule, 0)
        os.close(place)
    return descriptor


def restrict(descriptor: int) -> None:
    """Binds the calling process to it, in addition to what binds it already. Raises ``OSError``."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    system_call("landlock_restrict_self", RESTRICT_SELF, descriptor, 0)
