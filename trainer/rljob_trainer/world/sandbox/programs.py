"""Programs in a sandbox: what episodes call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from rljob_trainer.world.protocol import WorldError
from rljob_trainer.world.sandbox.keeper.protocol import Mode, SandboxLimits
from rljob_trainer.world.sandbox.launch import WORKERS_OF_A_PROCESS, Launcher, Prepared, sweep
from rljob_trainer.world.sandbox.protocol import NO_FILES, ProgramResult, check_program, outcome_of
from rljob_trainer.world.sandbox.worker import FinishedProgram, Worker


class LocalSandbox:
    """Runs programs, each a fresh one with an empty folder, in workers on this machine that are ready for them.

    To be used from one event loop. Two programs never run in one worker at the same time; who comes while all are busy
    waits, in order.
    """

    def __init__(
        self, mode: Mode, limits: SandboxLimits | None = None, workers: int = 2, prepared: Prepared | None = None
    ) -> None:
        """``prepared``: what programs find imported, and the Python that they run with (None: this one's, without
        packages). Raises ``ValueError``. Workers start when it is entered."""
        if not 1 <= workers <= WORKERS_OF_A_PROCESS:
            raise ValueError(f"a sandbox has 1 to {WORKERS_OF_A_PROCESS} workers, not {workers}")
        self._mode: Mode = mode
        self._limits = limits or SandboxLimits()
        self._prepared = prepared
        self._count = workers
        self._launcher: Launcher | None = None
        self._workers: set[Worker] = set()
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()

    async def __aenter__(self) -> Self:
        """Raises ``WorldError`` where the mode does not work here."""
        await asyncio.to_thread(sweep)
        try:
            self._launcher = await asyncio.to_thread(Launcher, self._mode, self._limits, self._prepared)
        except OSError as error:
            raise WorldError(f"the sandbox could not be prepared: {error}") from error
        started = [asyncio.create_task(self._start()) for _ in range(self._count)]
        try:
            for worker in await asyncio.gather(*started):
                self._idle.put_nowait(worker)
        except BaseException:
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    @property
    def not_contained(self) -> tuple[str, ...]:
        """What the mode would contain elsewhere and does not on this machine, in words. Once it is entered."""
        return self._entered().not_contained()

    @property
    def told(self) -> str:
        """What all modes have in common."""
        return "Only the standard library is there, and no network."

    async def run(self, source: str, stdin: str = "", files: Mapping[str, str] = NO_FILES) -> ProgramResult:
        """Runs ``source`` as ``program.py`` in an empty folder with ``files`` (paths below it, texts).

        Raises ``WorldError`` when the sandbox itself has failed, which says nothing of the program; the next call
        gets a new worker. Cancelled, it ends the program and all that it has started. Raises ``ValueError`` for files
        that are not in the folder, too many, or too large: they may fill half of what there is."""
        self._entered()
        check_program(source, stdin, files, self._limits)
        worker = await self._idle.get()
        try:
            if worker.closed:
                self._workers.discard(worker)
                worker = await self._start()
            return _result(await worker.run(source, stdin, files))
        finally:
            self._idle.put_nowait(worker)

    def _entered(self) -> Launcher:
        if self._launcher is None:
            raise RuntimeError("the sandbox is not open: it is used inside `async with`")
        return self._launcher

    async def _start(self) -> Worker:
        worker = await Worker.start(self._entered(), self._limits)
        self._workers.add(worker)
        return worker

    async def _close(self) -> None:
        launcher, self._launcher = self._launcher, None
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._workers.clear()
        if launcher is not None:
            await asyncio.to_thread(launcher.close)


def mode_available(mode: Mode) -> str | None:
    """Why programs can't run in this mode on this machine; None: one just has. Takes a few tenths of a second."""

    async def attempt() -> str | None:
        try:
            async with LocalSandbox(mode, workers=1) as sandbox:
                result = await sandbox.run("print(6 * 7)")
        except WorldError as error:
            return str(error)
        return None if result.stdout == "42\n" else f"a one-line test program ended unexpectedly: {result}"

    # In a thread: the caller's event loop, if it has one, can't run another.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(attempt())).result()


def _result(ended: FinishedProgram) -> ProgramResult:
    end = ended.end
    stderr = ended.stderr.decode(errors="replace")
    outcome = outcome_of(end.exit_code, stderr) if end.outcome == "exited" else end.outcome
    return ProgramResult(
        outcome, end.exit_code, ended.stdout.decode(errors="replace"), stderr, end.seconds, end.truncated
    )
