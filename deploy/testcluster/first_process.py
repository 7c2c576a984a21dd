"""What the first process of a process-id namespace does: run programs, start them again when they end, reap orphans.

One thread, no signals handled but SIGCHLD: when this process is killed, the kernel ends everything in the namespace.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from testcluster import control

RESTART_SECONDS = 1.0


@dataclass
class Processes:
    """The long-running programs of a namespace."""

    logs: Path
    environment: Mapping[str, str]
    _lines: dict[str, Sequence[str]] = field(default_factory=dict)
    _running: dict[int, str] = field(default_factory=dict)
    _due: dict[str, float] = field(default_factory=dict)
    """Programs that ended by themselves, and when they are started again."""

    def start(self, name: str, command: Sequence[str] | None = None, keep: Sequence[int] = ()) -> None:
        """Starts a program; without a command, one that was started before and stopped.

        Raises:
            ValueError: it runs already.
            KeyError: it was never started.
        """
        if name in self._running.values():
            raise ValueError(f"{name} runs already")
        if command is not None:
            self._lines[name] = command
        if name not in self._lines:
            raise KeyError(f"there is no program {name}; there are {', '.join(sorted(self._lines))}")
        self._due.pop(name, None)
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self._lines[name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.environment),
                pass_fds=keep,
                start_new_session=True,
            )
        self._running[process.pid] = name
        # The loop reaps; Popen must neither wait for it nor warn about it.
        process.returncode = 0

    def stop(self, name: str) -> None:
        """Kills a program and leaves it so.

        Raises:
            KeyError: it doesn't run.
        """
        for pid, running in list(self._running.items()):
            if running == name:
                del self._running[pid]
                os.kill(pid, signal.SIGKILL)
                return
        raise KeyError(f"{name} doesn't run; there are {', '.join(sorted(self._running.values()))}")

    def reap(self) -> None:
        """Takes the exit codes of everything that ended, and starts again what should run."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid, status = 0, 0
            if pid == 0:
                break
            name = self._running.pop(pid, None)
            if name is not None:
                self._due[name] = time.monotonic() + RESTART_SECONDS
                with (self.logs / f"{name}.log").open("a") as log:
                    log.write(f"-- ended with {os.waitstatus_to_exitcode(status)}; started again\n")
        for name, due in list(self._due.items()):
            if time.monotonic() >= due:
                self.start(name)

    def names(self) -> list[str]:
        """The names of the programs that run."""
        return sorted(self._running.values())


def serve(programs: Processes, listening: socket.socket, answer: Callable[[list[str]], str]) -> None:
    """Reaps and answers requests until killed."""
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select(timeout=RESTART_SECONDS):
            if key.fileobj is woken:
                woken.recv(4096)
            else:
                control.answer(listening, answer)
        programs.reap()
