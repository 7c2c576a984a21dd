"""A process of an agent's, as the driver sees it: under a warden, which ends it when the driver does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from rljob_trainer.episodes.record import EpisodeLostError

_WARDEN = Path(__file__).with_name("warden.py")
_READ_BYTES = 1 << 16
_KEPT_OUTPUT = 1 << 20
"""Of standard output, from its end: more than a reward is not of interest."""
_KEPT_ERRORS = 1 << 12
_LINE_BYTES = 1 << 26
_LOST = 75
"""EX_TEMPFAIL of sysexits.h: an agent says so that something is missing which may come back."""
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""Signals that a process gets from others: when memory runs out, for example."""


class AgentError(Exception):
    """An agent failed, and the failure is its own."""


class AgentProcess:
    """One process, from its start to its end. From within an event loop."""

    def __init__(self, warden: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._warden = warden
        self._control = control
        self._errors = bytearray()
        self._reading = asyncio.Lock()
        self._keeping = asyncio.create_task(self._keep_errors(), name="errors of an agent")

    @classmethod
    async def start(cls, command: Sequence[str], variables: Mapping[str, str], folder: Path) -> Self:
        """Starts ``command`` in ``folder`` with the driver's environment and these ``variables``. Raises
        ``EpisodeLostError`` where no process can be started."""
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            warden = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-B", str(_WARDEN), str(theirs.fileno()), *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=folder,
                env={**os.environ, **variables},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the driver's to handle
                limit=_LINE_BYTES,
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise EpisodeLostError(f"cannot start a process ({error.strerror or error})") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(warden, ours)

    @property
    def errors(self) -> str:
        """The end of what it wrote on standard error."""
        return self._errors.decode(errors="replace").strip()

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Writes to its standard input, and closes that after the ``last``. One that reads none of it is no error."""
        assert self._warden.stdin is not None
        try:
            self._warden.stdin.write(data)
            await self._warden.stdin.drain()
            if last:
                self._warden.stdin.close()
        except (BrokenPipeError, ConnectionResetError):
            pass

    def say(self, data: bytes) -> None:
        """Sends a message without waiting until it has gone."""
        assert self._warden.stdin is not None
        self._warden.stdin.write(data)

    async def line(self) -> bytes:
        """The next line of its standard output; empty when there is no more."""
        assert self._warden.stdout is not None
        async with self._reading:
            return await self._warden.stdout.readline()

    async def output(self) -> bytes:
        """The end of all that it writes on standard output, when it has ended."""
        assert self._warden.stdout is not None
        kept = bytearray()
        async with self._reading:
            while part := await self._warden.stdout.read(_READ_BYTES):
                kept += part
                del kept[:-_KEPT_OUTPUT]
        return bytes(kept)

    async def check_ended(self, name: str) -> None:
        """Waits for its end. Raises ``AgentError`` for one that failed, and ``EpisodeLostError`` where that says
        nothing about it: it was killed from outside, or asks to be tried again."""
        told = await asyncio.get_running_loop().sock_recv(self._control, 64)
        await asyncio.wait([self._keeping])
        code = int(told) if told else -int(signal.SIGKILL)
        if code == 0:
            return
        how = f"exit code {code}" if code > 0 else f"signal {_name_of(-code)}"
        # A shell or a launcher exits with 128 + n when what it ran was killed by signal n.
        if code == _LOST or -code in _FROM_OUTSIDE or code - 128 in _FROM_OUTSIDE:
            raise EpisodeLostError(f"{name} ended with {how}{_told(self.errors)}")
        raise AgentError(f"{name} ended with {how}{_told(self.errors)}")

    def end(self) -> None:
        """The process, and all that it has started, is killed; nobody waits for that."""
        with contextlib.suppress(OSError):  # it has gone by itself
            self._control.shutdown(socket.SHUT_RDWR)

    async def over(self) -> None:
        """When nothing of it is left. After ``end``."""
        assert self._warden.stdout is not None
        # A process of asyncio's counts as running as long as something is left in its pipes.
        async with self._reading:
            while await self._warden.stdout.read(_READ_BYTES):
                pass
        await asyncio.wait([self._keeping])
        await self._warden.wait()
        self._control.close()

    async def _keep_errors(self) -> None:
        assert self._warden.stderr is not None
        while part := await self._warden.stderr.read(_READ_BYTES):
            self._errors += part
            del self._errors[:-_KEPT_ERRORS]


def _told(errors: str) -> str:
    return f"; the end of its standard error:\n{errors}" if errors else ""


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
