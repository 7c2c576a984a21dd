"""A reward worker and all that it has started: ended together, whoever their parents are by then."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]

MARK = "RLJOB_REWARD_WORKER"
"""In the environment of a worker and of all that it starts, also of what outlives it: which worker that was."""
LATE_LOOK_SECONDS = 1.0
"""After a family's end its mark is looked for once more: a process that is about to run a program shows no environment
yet."""


def end_family(pid: int, mark: str) -> None:
    """Kills a worker, its group, and what it started in sessions of its own, also where the worker itself has ended
    already, so that nothing says any more whose children these were."""
    family = _descendants(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _kill(family)
    # A second look: what was being started meanwhile.
    end_marked(mark)


def end_marked(mark: str) -> None:
    """Kills what bears a worker's mark."""
    _kill(_marked(mark))


def _kill(members: list[int]) -> None:
    for member in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    """Processes of this user that began with a worker's mark in their environment."""
    if sys.platform != "linux":
        return []
    found, wanted = [], f"{MARK}={mark}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in file.read_bytes():
                found.append(int(file.parent.name))
    return found


def _descendants(pid: int) -> list[int]:
    """What a process has started and is still there, children's children included."""
    if sys.platform != "linux":
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return []
    found: list[int] = []
    parents = [pid]
    while parents:
        children: list[int] = []
        # Of each of its threads; a file that is gone is of a process that has ended.
        for file in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children += map(int, file.read_text().split())
        found += children
        parents += children
    return found
