"""The filters' programs, read by a small machine of our own, for both processors; the numbers beside libseccomp's."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import struct

import pytest

from rljob_trainer.world.sandbox.keeper.filters import (
    AUDIT_ARCHITECTURE,
    NEWEST,
    NUMBERS,
    keeper_filter,
    program_filter,
)

MACHINES = ("x86_64", "aarch64")
ALLOWED, EPERM, ENOSYS = "allowed", errno.EPERM, errno.ENOSYS


def answer(
    program: bytes, machine: str, name: str | int, *arguments: int, architecture: int | None = None
) -> str | int:
    """What the kernel would do with a call, from the definition of classic BPF (Linux, networking/filter.rst)."""
    number = NUMBERS[machine][name] if isinstance(name, str) else name
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=iIQ6Q", number, architecture or AUDIT_ARCHITECTURE[machine], 0, *padded)
    code = list(struct.iter_unpack("=HBBI", program))
    place = accumulator = 0
    while True:
        operation, if_true, if_false, value = code[place]
        place += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif operation == 0x54:
            accumulator &= value
        elif operation == 0x06:
            return ALLOWED if value == 0x7FFF0000 else value & 0xFFFF if value >> 16 == 5 else "killed"
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[operation]
            place += if_true if holds else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_the_keeper_may_do_what_it_needs_and_nothing_that_is_not_listed(machine: str) -> None:
    program = keeper_filter(machine)
    assert len(program) // 8 <= 4096, "the kernel's limit"
    for name in NUMBERS[machine]:
        assert answer(program, machine, name) == (ENOSYS if name == "clone3" else ALLOWED), name
    listed = set(NUMBERS[machine].values())
    for number in range(NEWEST + 200):
        if number not in listed:
            assert answer(program, machine, number) == (EPERM if number <= NEWEST else ENOSYS), number
    assert answer(program, machine, "read", architecture=0x40000003) == EPERM, "i386"
    assert answer(program, machine, "read", architecture=0x40000028) == EPERM, "32-bit ARM"
    assert answer(program, machine, 0x40000000) == ENOSYS, "x32"


@pytest.mark.parametrize("machine", MACHINES)
def test_programs_may_not_do_what_the_keeper_may(machine: str) -> None:
    program = program_filter(owner_of_files=False, alone=None, machine=machine)
    for name in ("unshare", "mount", "umount2", "seccomp", "capset", "landlock_restrict_self", "memfd_create"):
        assert answer(program, machine, name) == EPERM
    for name in ("read", "fchmodat", "kill", "clone", "execve", "fcntl", "ioctl"):
        assert answer(program, machine, name) == ALLOWED, name
    for flag in range(32):
        kind = 1 << flag
        # Namespaces: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET; PARENT, PTRACE, UNTRACED.
        refused = kind in (1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30, 1 << 15, 1 << 13, 1 << 23)
        assert answer(program, machine, "clone", kind | 17) == (EPERM if refused else ALLOWED), hex(kind)
    assert answer(program, machine, "prctl", 15) == ALLOWED
    assert answer(program, machine, "prctl", 36) == EPERM, "PR_SET_CHILD_SUBREAPER"
    assert answer(program, machine, "ioctl", 0, 0x5412) == EPERM, "TIOCSTI"
    assert answer(program, machine, "ioctl", 0, 0x5401) == ALLOWED, "TCGETS"
    assert answer(program, machine, "fcntl", 3, 8) == EPERM, "F_SETOWN"
    assert answer(program, machine, "prlimit64", 0) == ALLOWED
    assert answer(program, machine, "prlimit64", 7) == EPERM
    pairs = {(1, 1): ALLOWED, (1, 0o2000001): ALLOWED, (1, 2): EPERM, (1, 5): EPERM, (2, 1): EPERM}
    for (domain, kind), expected in pairs.items():
        assert answer(program, machine, "socketpair", domain, kind) == expected, (domain, kind)


@pytest.mark.parametrize("machine", MACHINES)
def test_programs_beside_files_and_processes_of_their_user_may_less(machine: str) -> None:
    program = program_filter(owner_of_files=True, alone=7, machine=machine)
    for name in ("fchmod", "fchmodat", "fchownat", "utimensat", "tkill", "pidfd_send_signal", "rt_sigqueueinfo"):
        assert answer(program, machine, name, 7) == EPERM, name
    assert answer(program, machine, "fchmodat2") == ENOSYS
    for name in ("kill", "tgkill"):
        assert answer(program, machine, name, 7) == ALLOWED
        assert answer(program, machine, name, 8) == EPERM
        assert answer(program, machine, name, 2**32 - 1) == EPERM, "all"
    assert answer(program, machine, "clone", 17) == EPERM
    assert answer(program, machine, "clone", 0x3D0F00) == ALLOWED, "a thread of the C library"
    assert answer(program, machine, "clone", 0x10000000 | 0x10000) == EPERM


@pytest.mark.parametrize(("machine", "token"), [("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)])
def test_numbers_are_those_of_libseccomp(machine: str, token: int) -> None:
    library = ctypes.util.find_library("seccomp")
    if library is None:
        pytest.skip("there is no libseccomp")
    resolve = ctypes.CDLL(library).seccomp_syscall_resolve_name_arch
    names = {name for numbers in NUMBERS.values() for name in numbers}
    theirs = {name: resolve(ctypes.c_uint32(token), name.encode()) for name in names}
    theirs["fchmodat2"] = 452  # newer than Debian 12; Linux, asm-generic/unistd.h
    assert NUMBERS[machine] == {name: number for name, number in theirs.items() if number >= 0}
