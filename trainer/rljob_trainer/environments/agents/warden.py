"""Stands between the driver and an agent's command, and ends the command with all that it has started.

    python -I -S -B warden.py CONTROL COMMAND [ARGUMENT ...]

Runs COMMAND in a session of its own, with the standard streams that the warden was given. CONTROL is the number of a
socket: the warden writes there how the command ended (its exit code, or the negative number of a signal), and when the
other side closes it, because the driver is dead or wants an end, the command is killed. The driver cannot do that
itself: a process that is killed with SIGKILL kills nobody. Standard library only, and of that little: it starts with
every command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_NOT_FOUND = 127
_END_SECONDS = 5.0
"""Then the rest is left alone: it is another user's, and cannot be killed."""


def main() -> None:
    control, command = int(sys.argv[1]), sys.argv[2:]
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, _noted)
    # Whoever loses its parent becomes a child of this process, and is found when all is ended.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    child = os.fork()
    if child == 0:
        _become(command, [control, woken, wake])
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    code = _until_the_end(child, control, woken)
    _end_all(child)
    with contextlib.suppress(OSError):
        os.write(control, str(code).encode())


def _noted(number: int, _: object) -> None:
    """Its number is in the pipe that wakes the loop."""


def _become(command: list[str], descriptors: list[int]) -> None:
    """The child becomes the command."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(_NOT_FOUND)


def _until_the_end(child: int, control: int, woken: int) -> int:
    """How the command has ended: by itself, or because nobody wants it any more."""
    while True:
        readable, _, _ = select.select([control, woken], [], [])
        told = b""
        if woken in readable:
            told = os.read(woken, 4096)
            while True:
                try:
                    ended, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if ended == 0:
                    break
                if ended == child:
                    return os.waitstatus_to_exitcode(status)
        if control in readable or signal.SIGTERM in told:
            return -signal.SIGKILL


def _end_all(child: int) -> None:
    """Kills the command's group, and whatever else has become a child of this process, generation after generation."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    until = time.monotonic() + _END_SECONDS
    while time.monotonic() < until:
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        for other in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(other, signal.SIGKILL)
        time.sleep(0.001)


def _children() -> list[int]:
    """The children of this process; none where the system does not tell (it is not Linux)."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        with contextlib.suppress(OSError):
            if name.isdigit() and _parent(name) == os.getpid():
                found.append(int(name))
    return found


def _parent(name: str) -> int:
    with open(f"/proc/{name}/stat", errors="replace") as file:
        # The process's name is in parentheses, and may hold anything.
        return int(file.read().rpartition(")")[2].split()[1])


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
