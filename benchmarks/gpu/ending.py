"""Processes that end with whoever started them, however that ends. Standard library only."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ENDED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What ends a command in good order: with what it runs, and with what was measured kept and printed."""
INTERRUPTED = 130
"""The exit code then."""


@contextmanager
def guarded(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whoever kills this process outright leaves none that holds the GPU: a shell reads from a pipe that only this
    process can write to, which ends with it, and then kills the session of ``process`` (PR_SET_PDEATHSIG would end
    that process alone)."""
    command = ["sh", "-c", f"read -r never; kill -9 -{process.pid}"]
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
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
