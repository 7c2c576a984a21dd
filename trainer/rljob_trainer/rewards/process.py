"""One reward worker as the driver sees it: start, score a few samples, notice a hang or a crash, end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rljob_trainer.errors import JobFileError, RewardError
from rljob_trainer.rewards.frames import (
    COMPANY_SECONDS,
    Calling,
    Request,
    Scored,
    Setup,
    SharedMemory,
    Unframing,
    frame,
)
from rljob_trainer.rewards.terms import Failure, Outcome, Response, TermSpec

START_SECONDS = 120.0
"""Interpreter, imports of the user's module, math-verify: seconds normally, much longer on a loaded machine."""
_SECOND_LOOK_SECONDS = 1.0
_READ_BYTES = 1 << 20
_GONE = object()


class WorkerProcess:
    """Owns at most one process at a time; whoever leases it awaits one call at once."""

    def __init__(self, terms: Sequence[TermSpec], timeout_seconds: float, paths: Sequence[str]) -> None:
        """``paths`` are put before the interpreter's own when the worker looks for the user's modules."""
        self._terms = tuple(terms)
        self._timeout = timeout_seconds
        self._paths = tuple(paths)
        self._process: asyncio.subprocess.Process | None = None
        self._memory: SharedMemory | None = None
        self._reader: asyncio.Task[None] | None = None
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Starts the process unless it runs. Raises ``JobFileError`` when a function cannot be loaded."""
        if self._process is not None:
            if self._process.returncode is None and self._arrived.empty():
                return
            # It ended while nobody used it (out of memory, say): no sample is to blame.
            await self.kill()
        self._memory = SharedMemory.new()
        descriptor = self._memory.file.fileno()
        search = os.pathsep.join(dict.fromkeys((*self._paths, *(p for p in sys.path if p))))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rljob_trainer.rewards.worker",
            str(descriptor),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
            # A group of its own: Ctrl-C is the driver's to handle, and what the functions start ends with them.
            start_new_session=True,
            pass_fds=[descriptor],
        )
        self._arrived = asyncio.Queue()
        self._reader = asyncio.create_task(self._read(self._process, self._arrived), name="reward worker frames")
        try:
            self._send(Setup(self._terms, self._timeout))
            answer = await self._next(START_SECONDS)
        except BaseException:
            await self.kill()
            raise
        if not isinstance(answer, list):
            how = "ended" if answer is _GONE else f"did not answer within {START_SECONDS:.0f} s"
            code = await self.kill()
            raise RewardError(f"a reward worker {how} while it started (exit code {code}); see its output above")
        (ready,) = answer
        if ready.problem is not None:
            await self.kill()
            raise JobFileError(ready.problem)

    async def score(self, responses: Sequence[Response]) -> list[Outcome]:
        """One outcome per response, each with a verdict or failure of every term that applies.

        A function that hangs or crashes costs its process; the sample's other functions and the other samples are
        then scored by a new one. On cancellation the worker is killed too.
        """
        outcomes: list[Outcome] = [{} for _ in responses]
        ended: list[set[str]] = [set() for _ in responses]
        pending = list(range(len(responses)))
        alone = False
        while pending:
            batch = pending[:1] if alone else pending
            progress = _Progress([Request(responses[i], frozenset(ended[i])) for i in batch])
            problem = await self._attempt(progress)
            for i, outcome in zip(batch, progress.outcomes, strict=True):
                outcomes[i] |= outcome
            if problem is not None:
                culprit = progress.culprit()
                if culprit is None:
                    # Async functions of several samples were under way: find the one by calling them singly.
                    alone = True
                else:
                    i = batch[culprit]
                    term = progress.calling.get(culprit) or self._only_term(responses[i], ended[i])
                    outcomes[i][term] = Failure(term, problem, ended=True)
                    ended[i].add(term)
            final = {batch[i] for i in progress.final}
            pending = [i for i in pending if i not in final]
        return outcomes

    async def kill(self, progress: _Progress | None = None) -> int | None:
        """Ends the process and all that it started, at once. Returns its exit code.

        ``progress`` takes note of what the process had to say and had not sent.
        """
        process, self._process = self._process, None
        memory, self._memory = self._memory, None
        if process is None or memory is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if self._reader is not None:
            self._reader.cancel()
        code = await process.wait()
        assert process.stdin is not None
        process.stdin.close()
        if progress is not None:
            progress.note(memory.messages())
        memory.close()
        return code

    async def _attempt(self, progress: _Progress) -> str | None:
        """Scores until all samples are final (None) or the worker hangs or dies (what happened)."""
        try:
            await self.start()
            self._send(progress.requests)
            while not progress.finished:
                arrived = await self._next(self._timeout + COMPANY_SECONDS)
                if isinstance(arrived, list):
                    progress.note(arrived)
                    continue
                code = await self.kill(progress)
                if progress.finished:
                    return None
                if arrived is _GONE:
                    return f"its worker process died ({_exit_reason(code)})"
                return f"no result within {self._timeout:g} s; its worker process was killed"
        except BaseException:
            await self.kill()
            raise
        return None

    def _only_term(self, response: Response, ended: set[str]) -> str:
        """The term that must have been called where the worker does not announce it: there is just one."""
        return next(spec.name for spec in self._terms if spec.name not in ended and spec.applies_to(response.source))

    def _send(self, message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(frame(message))

    async def _next(self, seconds: float) -> Any:
        """The next messages (a list), ``_GONE`` when the process ended, None when the time is over."""
        for wait in (seconds, _SECOND_LOOK_SECONDS):
            # The second look is for a driver that was busy elsewhere while the message lay in the pipe.
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self._arrived.get(), wait)
        return None

    @staticmethod
    async def _read(process: asyncio.subprocess.Process, arrived: asyncio.Queue[Any]) -> None:
        assert process.stdout is not None
        unframing = Unframing()
        with contextlib.suppress(ConnectionError):
            while data := await process.stdout.read(_READ_BYTES):
                if messages := unframing.messages(data):
                    arrived.put_nowait(messages)
        arrived.put_nowait(_GONE)


class _Progress:
    """How far a worker got with a list of samples: plain functions in order, then async ones together."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.outcomes: list[Outcome] = [{} for _ in requests]
        self.final: set[int] = set()
        self.calling: dict[int, str] = {}
        """The term announced last, by sample."""
        self._begun_async: set[int] = set()

    @property
    def finished(self) -> bool:
        return len(self.final) == len(self.requests)

    def note(self, messages: Iterable[Any]) -> None:
        for message in messages:
            if isinstance(message, Scored):
                self.outcomes[message.sample] |= message.outcome
                (self.final if message.final else self._begun_async).add(message.sample)
            elif isinstance(message, Calling):
                self.calling[message.sample] = message.term

    def culprit(self) -> int | None:
        """The sample under way when the worker stopped; None when it may be any of several."""
        for index in range(len(self.requests)):
            if index not in self.final and index not in self._begun_async:
                return index
        unfinished = self._begun_async - self.final
        return unfinished.pop() if len(unfinished) == 1 else None


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
