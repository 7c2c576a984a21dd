"""The processor time that a pytest process and everything it has started have taken, in seconds.

Where control groups v1 can be made (root, as in CI), the process moves into one of its own, which also counts what has
left it: Ray's workers belong to others, and their parents never hear of their end. Elsewhere only the process itself
and children that it has waited for are counted.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

HIERARCHY = Path("/sys/fs/cgroup/cpuacct")


def processor_clock() -> Callable[[], float]:
    """What it shows begins near zero."""
    with contextlib.suppress(OSError):
        return _group_clock()
    return _own_clock


def _group_clock() -> Callable[[], float]:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    here = next((line.split(":", 2)[2] for line in lines if "cpuacct" in line.split(":")[1].split(",")), None)
    if here is None:
        raise FileNotFoundError("no cpuacct")
    above = HIERARCHY / here.lstrip("/")
    group = above / f"pytest-{os.getpid()}"
    group.mkdir()
    (group / "cgroup.procs").write_text(str(os.getpid()))
    atexit.register(_leave, group, above, os.getpid())
    usage = os.open(group / "cpuacct.usage", os.O_RDONLY)  # once: tests stand in for what opens files
    return lambda: int(os.pread(usage, 32, 0)) / 1e9


def _leave(group: Path, above: Path, owner: int) -> None:
    """Forks have been registered too, and stay where they are."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError):  # what still runs in there keeps it
            (above / "cgroup.procs").write_text(str(owner))
            group.rmdir()


def _own_clock() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)
