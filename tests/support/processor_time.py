"""The processor time that a pytest process and everything it has started have taken, in seconds, and what of it still
runs when it has ended.

Where control groups v1 can be made (root, as in CI), the process moves into one of its own, which also counts what has
left it: Ray's workers belong to others, and their parents never hear of their end. Elsewhere only the process itself
and children that it has waited for are counted.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

HIERARCHY = Path("/sys/fs/cgroup/cpuacct")


def processor_clock() -> Callable[[], float]:
    """What it shows begins near zero."""
    with contextlib.suppress(OSError):
        return _group_clock()
    return _own_clock


def _group_clock() -> Callable[[], float]:
    above = own_group()
    group = _group_of(above, os.getpid())
    group.mkdir()
    (group / "cgroup.procs").write_text(str(os.getpid()))
    atexit.register(_leave, group, above, os.getpid())
    usage = os.open(group / "cpuacct.usage", os.O_RDONLY)  # once: tests stand in for what opens files
    return lambda: int(os.pread(usage, 32, 0)) / 1e9


def own_group() -> Path:
    """The group of this process, where control groups v1 count processor time."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    here = next((line.split(":", 2)[2] for line in lines if "cpuacct" in line.split(":")[1].split(",")), None)
    if here is None:
        raise FileNotFoundError("no cpuacct")
    return HIERARCHY / here.lstrip("/")


def _group_of(above: Path, process: int) -> Path:
    return above / f"pytest-{process}"


def end_what_is_left(owners: Iterable[int]) -> set[str]:
    """Kills what is still in the groups that pytest processes of these numbers have made, but for this process itself.
    The names of the programs that it ended; none where there are no such groups."""
    ended = set[str]()
    with contextlib.suppress(FileNotFoundError):
        here = own_group()
        for group in (here if owner == os.getpid() else _group_of(here, owner) for owner in owners):
            for _ in range(100):  # what is killed may have started something meanwhile, and takes a moment to end
                left = _members(group) - {os.getpid()}
                for process in left:
                    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                        ended.add(Path(f"/proc/{process}/comm").read_text().strip())
                        os.kill(process, signal.SIGKILL)
                if not left:
                    break
                time.sleep(0.05)
            with contextlib.suppress(OSError):  # gone, or this process's own
                group.rmdir()
    return ended


def _members(group: Path) -> set[int]:
    """Without those that have ended and nobody has waited for."""
    with contextlib.suppress(FileNotFoundError):
        return {int(line) for line in (group / "cgroup.procs").read_text().split() if runs(int(line))}
    return set()


def runs(process: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _leave(group: Path, above: Path, owner: int) -> None:
    """Forks have been registered too, and stay where they are."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError):  # what still runs in there keeps it
            (above / "cgroup.procs").write_text(str(owner))
            group.rmdir()


def _own_clock() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)
