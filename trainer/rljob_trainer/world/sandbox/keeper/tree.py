"""Processes and what they have started, read from /proc. Standard library only: this runs inside the sandbox."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress

_PAGE = os.sysconf("SC_PAGE_SIZE")


def children(process: int) -> list[int]:
    """The children of all threads of a process; of one that is gone none."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            found += map(int, _read(f"/proc/{process}/task/{thread}/children").split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def descendants(process: int) -> Iterator[int]:
    waiting = children(process)
    while waiting:
        found = waiting.pop()
        yield found
        waiting += children(found)


def usage(process: int) -> tuple[int, int]:
    """Threads of all descendants of a process, and the memory that they have in use together, in bytes."""
    threads = resident = 0
    for found in descendants(process):
        try:
            # The second field, the name, is in brackets and may hold anything.
            fields = _read(f"/proc/{found}/stat").rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        threads += int(fields[17])
        resident += int(fields[21]) * _PAGE
    return threads, resident


def nameless(process: int) -> int:
    """Bytes on the disk of files that a process holds open and that nobody else will find."""
    size = 0
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):
                found = os.stat(f"/proc/{process}/fd/{descriptor}")
                if found.st_nlink == 0 and stat.S_ISREG(found.st_mode):
                    size += found.st_blocks * 512
    return size


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 65536)
    finally:
        os.close(descriptor)
