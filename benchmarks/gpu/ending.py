"""Processes that end with whoever started them, however that ends. Standard library only."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ENDED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What ends a command in good order: with what it runs, and with what was measured kept and printed."""
INTERRUPTED = 130
"""The exit code then."""
_TRACKER = b"multiprocessing.resource_tracker"
_TRACKER_SECONDS = 5.0
"""For such a process to remove what the killed ones have left; it takes milliseconds."""
_LOOKS_SECONDS = 0.01


@contextmanager
def guarded(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whoever kills this process outright leaves none that holds the GPU: a shell reads from a pipe that only this
    process can write to, which ends with it, and then kills the session of ``process`` (PR_SET_PDEATHSIG would end
    that process alone). SIGTERM comes first, which Python's resource trackers ignore: see ``_kill_group``."""
    command = ["sh", "-c", f"read -r never; kill -15 -{process.pid}; sleep 1; kill -9 -{process.pid}"]
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


def end(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """Ends a session that begins with ``process``, politely at first."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
    _kill_group(process.pid)
    process.wait()


def _kill_group(group: int) -> None:
    """Kills all processes of a group, Python's resource trackers last: semaphores and shared memory that processes give
    each other by name (``multiprocessing``, with "spawn") stay in /dev/shm when they are killed. The tracker, one more
    process, removes them once the others are gone, and then ends by itself."""
    give_up = time.monotonic() + _TRACKER_SECONDS
    while (members := _members(group)) and time.monotonic() < give_up:
        for member, command in members.items():
            if _TRACKER not in command:
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
        time.sleep(_LOOKS_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> dict[int, bytes]:
    """The living processes of a group, and their command lines; none where there is no /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # it has ended meanwhile
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found[int(folder.name)] = (folder / "cmdline").read_bytes()
    return found
