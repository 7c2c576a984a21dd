"""The driver's side of one worker: start, one program at a time, end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from rljob_trainer.world.protocol import WorldError
from rljob_trainer.world.sandbox.keeper.protocol import (
    CANCEL,
    ENDED,
    FAILED,
    HEADER,
    READY,
    REQUEST,
    ProgramEnd,
    SandboxLimits,
)
from rljob_trainer.world.sandbox.launch import Launched, Launcher

GRACE_SECONDS = 20.0
"""Beyond the limit of wall time, until a worker that says nothing is taken for broken."""
MOST_SAID = 64 * 2**10
"""Bytes of a failure's text."""


@dataclass(frozen=True, slots=True)
class FinishedProgram:
    """How a program ended, with what it wrote, each cut at the limit."""

    end: ProgramEnd
    stdout: bytes
    stderr: bytes


class Worker:
    """One keeper. A worker that fails, in whatever way, is closed: it never serves another program."""

    def __init__(
        self,
        launched: Launched,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: SandboxLimits,
    ) -> None:
        self._process = launched.process
        self._folder = launched.folder
        self._reader = reader
        self._writer = writer
        self._limits = limits

    @classmethod
    async def start(cls, launcher: Launcher, limits: SandboxLimits) -> Worker:
        """Returns when it is ready. Raises ``WorldError``."""
        try:
            launched = launcher.launch()
        except OSError as error:
            raise WorldError(f"cannot start the sandbox's worker: {error}") from error
        reader, writer = await asyncio.open_connection(sock=launched.control)
        worker = cls(launched, reader, writer, limits)
        try:
            async with asyncio.timeout(launcher.start_seconds):
                kind, _ = await worker._frame(0)
            if kind != READY:
                raise WorldError(f"the sandbox's worker sent {kind!r} instead of ready")
        except TimeoutError as error:
            await worker.close()
            raise WorldError(f"the sandbox's worker was not ready after {launcher.start_seconds:.0f} s") from error
        except BaseException:
            await worker.close()
            raise
        return worker

    @property
    def closed(self) -> bool:
        return self._writer.is_closing()

    async def run(self, source: str, stdin: str, files: Mapping[str, str]) -> FinishedProgram:
        """Runs one program. Raises ``WorldError``, after which the worker is closed, as it is when the call is
        cancelled before the worker has all of the program. Cancelled later, the program has ended when this
        raises."""
        payload = json.dumps({"source": source, "stdin": stdin, "files": dict(files)}).encode()
        try:
            self._writer.write(REQUEST.pack(len(payload)) + payload)
            async with asyncio.timeout(GRACE_SECONDS):
                await self._writer.drain()
        except (ConnectionError, TimeoutError) as error:
            raise await self._broken(error) from error
        except BaseException:
            await self.close()
            raise
        try:
            return await self._answer()
        except asyncio.CancelledError:
            await self._cancel()
            raise

    async def close(self) -> None:
        """Ends the worker and the program that it runs, and waits for that."""
        self._writer.close()
        try:
            await asyncio.shield(self._gone())
        finally:
            if self._process.stderr is not None:
                self._process.stderr.close()

    async def _gone(self) -> None:
        """Waits until the process has ended, by force where it does not, and deletes its folder."""
        for wait in (GRACE_SECONDS, GRACE_SECONDS):
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    while self._process.poll() is None:  # noqa: ASYNC110  nothing says it but a thread
                        await asyncio.sleep(0.002)
                break
            self._process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _answer(self) -> FinishedProgram:
        try:
            async with asyncio.timeout(self._limits.wall_seconds + GRACE_SECONDS):
                kind, said = await self._frame(ProgramEnd.LAYOUT.size + 2 * self._limits.output_bytes)
        except TimeoutError as error:
            raise await self._broken(error) from error
        if kind == FAILED:
            await self.close()
            text = said.decode(errors="replace").strip()
            raise WorldError(f"the sandbox could not start a program: {text}")
        try:
            if kind != ENDED:
                raise ValueError(f"an unknown frame {kind!r}")
            end = ProgramEnd.unpack(said[: ProgramEnd.LAYOUT.size])
            written = said[ProgramEnd.LAYOUT.size :]
            if len(written) != end.stdout_bytes + end.stderr_bytes:
                raise ValueError("frames of a wrong length")
        except (ValueError, IndexError, struct.error) as error:
            raise await self._broken(error) from error
        return FinishedProgram(end, written[: end.stdout_bytes], written[end.stdout_bytes :])

    async def _frame(self, most: int) -> tuple[bytes, bytes]:
        try:
            kind, length = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if length > max(most, MOST_SAID):
                raise ValueError(f"a frame of {length} bytes")
            return kind, await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
            raise await self._broken(error) from error

    async def _cancel(self) -> None:
        """Ends the program that runs. Where that takes long, or is cancelled in turn, the worker ends with it."""
        try:
            self._writer.write(CANCEL)
            async with asyncio.timeout(GRACE_SECONDS):
                await self._answer()
        except (WorldError, TimeoutError, asyncio.CancelledError):
            await self.close()

    async def _broken(self, error: Exception) -> WorldError:
        """Closes the worker, and says what it said at its end."""
        self._writer.close()
        await asyncio.shield(self._gone())
        text = ""
        stderr = self._process.stderr
        if stderr is not None and not stderr.closed:
            os.set_blocking(stderr.fileno(), False)
            with suppress(BlockingIOError):
                text = os.read(stderr.fileno(), MOST_SAID).decode(errors="replace").strip()
            stderr.close()
        status = self._process.returncode
        return WorldError(f"the sandbox's worker failed ({error!r}, exit status {status}): {text or 'it said nothing'}")
