"""One reward worker as the driver sees it: start, score a few samples, notice a hang or a crash, end it.

Whose fault an end is, is told apart as far as that can be done honestly. A worker that died is replaced, and the sample
that it was at is scored once more, alone: only a second death is held against anybody. A signal that the process
brought on itself (a segmentation fault, an alarm, ``os.kill`` of its own number) or an exit code is the function's;
SIGKILL, SIGTERM and the like of unknown origin are nobody's (``RewardFailure.lost``). Time in which the worker was
stopped does not count, nor does a pause of the whole machine; one that stays stopped is replaced like one that died. A
function that had its time is slow, and is not called again: it would take as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]

from rljob_trainer.errors import IntegrityError, JobFileError, RewardWorkerError
from rljob_trainer.rewards.family import LATE_LOOK_SECONDS, MARK, end_family, end_marked
from rljob_trainer.rewards.frames import (
    COMPANY_SECONDS,
    Calling,
    GarbledError,
    Request,
    Scored,
    Setup,
    SharedMemory,
    Unframing,
    frame,
)
from rljob_trainer.rewards.terms import Outcome, Response, RewardFailure, TermSpec

START_SECONDS = 120.0
"""Interpreter, imports of the user's module, math-verify: seconds normally, much longer on a loaded machine."""
_STARTS = 2
_LOOK_SECONDS = 0.25
"""How often a worker that says nothing is looked at."""
_HELD_UP_SECONDS = 1.0
"""A look that comes so late was held up: the driver was busy elsewhere, or the whole machine was paused."""
_READ_BYTES = 1 << 20
_LAST_WORDS_SECONDS = 1.0
"""How long after a worker's end its pipe is read: what it started may hold it open for ever."""
_FROM_OUTSIDE = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGSTOP, signal.SIGPWR}
    if sys.platform == "linux"
    else {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGSTOP}
)
"""Signals that a process gets from others; further ones are mostly brought on by what it does itself."""
_STOPPING = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


class _Gone:
    """The process has ended."""


class _Garbled:
    """Something else than the worker wrote into its pipe."""


class _Late:
    """The worker had its time."""


class _Stopped:
    """The worker has been stopped for as long as it has time."""


@dataclass(frozen=True, slots=True)
class _End:
    """Why a worker ended in the middle of its work."""

    problem: str
    outside: bool = False
    """Nothing that it did itself is known to have brought it on."""
    had_its_time: bool = False
    """It ran all the time that a sample has: another try would take as long."""


class WorkerProcess:
    """Owns at most one process at a time; whoever leases it awaits one call at once."""

    def __init__(self, terms: Sequence[TermSpec], timeout_seconds: float, paths: Sequence[str]) -> None:
        """``paths`` are put before the interpreter's own when the worker looks for the user's modules."""
        self._terms = tuple(terms)
        self._timeout = timeout_seconds
        self._paths = tuple(paths)
        self._process: asyncio.subprocess.Process | None = None
        self._mark = ""
        self._memory: SharedMemory | None = None
        self._pipes: list[asyncio.BaseTransport] = []
        self._incoming: asyncio.WriteTransport | None = None
        self._reading: list[asyncio.Task[None]] = []
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Starts the process unless it runs.

        Raises ``JobFileError`` when a function cannot be loaded, ``RewardWorkerError`` when processes cannot be started
        or are lost while they start.
        """
        if self._process is not None:
            if self._process.returncode is None and self._arrived.empty():
                return
            # It ended while nobody used it (out of memory, say): no sample is to blame.
            await self.kill()
        for attempt in range(_STARTS):
            try:
                await self._spawn()
                self._send(Setup(self._terms, self._timeout))
                answer = await self._next(START_SECONDS)
            except OSError as problem:
                await self.kill()
                raise RewardWorkerError(
                    f"cannot start a reward worker ({problem.strerror or problem}); free resources (memory, processes, "
                    "open files, space for temporary files) and try again"
                ) from problem
            except BaseException:
                await self.kill()
                raise
            if isinstance(answer, list):
                break
            end = await self._ended(answer, None, START_SECONDS)
            if attempt + 1 < _STARTS:
                continue
            if end.outside or end.had_its_time:
                raise RewardWorkerError(
                    f"reward workers do not start: {end.problem}, {_STARTS} times; see the output above, give the "
                    "process more memory if it may have run out, and try again"
                )
            modules = ", ".join(dict.fromkeys(f"{s.place} ({s.function or s.type})" for s in self._terms))
            raise JobFileError(
                f"{modules}: importing what the reward needs ends the worker process: {end.problem}, {_STARTS} times; "
                "correct the module (see the output above)"
            )
        (ready,) = answer
        if ready.problem is not None:
            await self.kill()
            raise JobFileError(ready.problem)

    async def _spawn(self) -> None:
        """Pipes of our own: a process of asyncio's counts as running while what it started holds its pipes open."""
        self._mark = uuid.uuid4().hex
        self._memory = SharedMemory.new()
        descriptor = self._memory.file.fileno()
        search = os.pathsep.join(dict.fromkeys((*self._paths, *(p for p in sys.path if p))))
        loop = asyncio.get_running_loop()
        with _closing() as ours:
            (their_input, our_output), (our_input, their_output) = ours.pipe(), ours.pipe()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rljob_trainer.rewards.worker",
                str(descriptor),
                stdin=their_input,
                stdout=their_output,
                env=os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", MARK: self._mark},
                # A group of its own: Ctrl-C is the driver's to handle, and what the functions start ends with them.
                start_new_session=True,
                pass_fds=[descriptor],
            )
            stream = asyncio.StreamReader(limit=_READ_BYTES)
            reading, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stream), ours.handed_over(our_input, "rb")
            )
            self._pipes.append(reading)
            writing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, ours.handed_over(our_output, "wb"))
            self._pipes.append(writing)
            self._incoming = writing
        self._arrived = asyncio.Queue()
        read = asyncio.create_task(self._read(stream, self._arrived), name="reward worker frames")
        ending = asyncio.create_task(self._await_end(self._process, read, self._arrived), name="reward worker end")
        self._reading = [read, ending]

    async def score(self, responses: Sequence[Response]) -> list[Outcome]:
        """One outcome per response, each with a verdict or failure of every term that applies.

        A function that hangs or crashes costs its process; the sample's other functions and the other samples are
        then scored by a new one. On cancellation the worker is killed too.
        """
        outcomes: list[Outcome] = [{} for _ in responses]
        ended: list[set[str]] = [set() for _ in responses]
        pending = list(range(len(responses)))
        suspects: set[tuple[int, str]] = set()
        """Sample and term at which a worker ended once."""
        suspect: int | None = None
        alone = False
        while pending:
            batch = [suspect] if suspect is not None else pending[:1] if alone else pending
            suspect = None
            progress = _Progress([Request(responses[i], frozenset(ended[i])) for i in batch])
            end = await self._attempt(progress)
            for i, outcome in zip(batch, progress.outcomes, strict=True):
                outcomes[i] |= outcome
                # A function that has ruined its worker has said so itself.
                ended[i].update(t for t, v in outcome.items() if isinstance(v, RewardFailure) and v.ended)
            final = {batch[i] for i in progress.final}
            if end is not None:
                culprit = progress.culprit()
                if culprit is None:
                    # Async functions of several samples were under way, or none: find the one by calling them singly.
                    alone = True
                else:
                    i = batch[culprit]
                    term = progress.calling.get(culprit) or self._only_term(responses[i], ended[i])
                    if term is None:
                        alone = True
                    elif end.had_its_time or ((i, term) in suspects and len(batch) == 1):
                        outcomes[i][term] = _blamed(term, end)
                        ended[i].add(term)
                    else:
                        suspects.add((i, term))
                        suspect = i
            pending = [i for i in pending if i not in final]
        return outcomes

    async def kill(self, progress: _Progress | None = None) -> int | None:
        """Ends the process and all that it started, at once. Returns its exit code.

        ``progress`` takes note of what the process had to say and had not sent.
        """
        process, self._process = self._process, None
        memory, self._memory = self._memory, None
        pipes, self._pipes = self._pipes, []
        reading, self._reading = self._reading, []
        self._incoming = None
        for task in reading:
            task.cancel()
        code = None
        if process is not None:
            mark = self._mark  # a successor has one of its own
            end_family(process.pid, mark)
            code = await process.wait()
            asyncio.get_running_loop().call_later(LATE_LOOK_SECONDS, end_marked, mark)
        for pipe in pipes:
            if not pipe.is_closing():
                # What is still to be written is for nobody.
                pipe.abort() if isinstance(pipe, asyncio.WriteTransport) else pipe.close()
        if memory is not None:
            if progress is not None:
                with contextlib.suppress(GarbledError):
                    progress.note(memory.messages())
            memory.close()
        return code

    async def _attempt(self, progress: _Progress) -> _End | None:
        """Scores until all samples are final (None) or the worker hangs or dies (what happened)."""
        try:
            await self.start()
            self._send(progress.requests)
            while not progress.finished:
                arrived = await self._next(self._timeout + COMPANY_SECONDS)
                if isinstance(arrived, list):
                    progress.note(arrived)
                    continue
                end = await self._ended(arrived, progress, self._timeout)
                return None if progress.finished else end
        except BaseException:
            await self.kill()
            raise
        return None

    async def _ended(self, how: Any, progress: _Progress | None, seconds: float) -> _End:
        """Ends the worker after what ``_next`` has said of it. Returns why."""
        own_signal = self._memory.own_signal if self._memory else 0
        # What a worker that does not own its pipe any more has not sent is not believed either.
        code = await self.kill(None if how is _Garbled else progress)
        if how is _Late:
            return _End(f"no result within {seconds:g} s; its worker process was killed", had_its_time=True)
        if how is _Garbled:
            return _End("something wrote to the pipe of its worker process, so its answers became unreadable")
        if how is _Stopped:
            number = int(signal.SIGSTOP)
            what = f"stopped for {seconds:g} s (SIGSTOP, a debugger)"
        elif code is None or code >= 0:
            return _End(f"it ended its worker process (exit code {code})")
        else:
            number = -code
            what = f"ended by signal {_signal_name(number)}"
        if own_signal == number or (how is _Stopped and own_signal in _STOPPING):
            return _End(f"its worker process was {what}, which the function sent itself")
        return _End(f"its worker process was {what}", outside=number in _FROM_OUTSIDE)

    def _only_term(self, response: Response, ended: set[str]) -> str | None:
        """The term that must have been called where the worker does not announce it: there is just one. None: the
        sample has had all its terms."""
        return next(
            (spec.name for spec in self._terms if spec.name not in ended and spec.applies_to(response.source)), None
        )

    def _send(self, message: Any) -> None:
        assert self._incoming is not None
        self._incoming.write(frame(message))

    async def _next(self, seconds: float) -> Any:
        """The next messages (a list), or what has become of the worker: ``_Gone``, ``_Garbled``, ``_Late`` after
        ``seconds`` in which it was able to run, ``_Stopped`` after as many in which it was not."""
        ran = stopped = 0.0
        last_look = False
        while True:
            asked = _HELD_UP_SECONDS if last_look else min(_LOOK_SECONDS, max(seconds - ran, 0.0))
            began = time.monotonic()
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self._arrived.get(), asked)
            if last_look:
                return _Late
            passed = time.monotonic() - began
            if self._is_stopped():
                stopped += passed
                self._does_not_count(passed)
                if stopped >= max(seconds, _HELD_UP_SECONDS):
                    return _Stopped
                continue
            if passed > asked + _HELD_UP_SECONDS:
                self._does_not_count(passed - asked)
                passed = asked
            ran += passed
            # One last look is for a driver that was busy elsewhere while the message lay in the pipe.
            last_look = ran >= seconds

    def _is_stopped(self) -> bool:
        try:
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.Error:
            return False

    def _does_not_count(self, seconds: float) -> None:
        """Lets the worker know, which gives its async functions their time."""
        if self._memory is not None:
            self._memory.stopped_seconds += seconds

    @staticmethod
    async def _read(stream: asyncio.StreamReader, arrived: asyncio.Queue[Any]) -> None:
        unframing = Unframing()
        with contextlib.suppress(ConnectionError):
            while data := await stream.read(_READ_BYTES):
                try:
                    messages = unframing.messages(data)
                except GarbledError:
                    arrived.put_nowait(_Garbled)
                    return
                if messages:
                    arrived.put_nowait(messages)

    @staticmethod
    async def _await_end(
        process: asyncio.subprocess.Process, read: asyncio.Task[None], arrived: asyncio.Queue[Any]
    ) -> None:
        ended = asyncio.ensure_future(process.wait())
        try:
            # A worker that has closed its pipe will never answer, and one that has ended may have left it open.
            await asyncio.wait({ended, read}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ended, read}, timeout=_LAST_WORDS_SECONDS)
        finally:
            ended.cancel()
        arrived.put_nowait(_Gone)


class _closing:  # noqa: N801  (a context manager)
    """Pipes of which each end is closed on leaving, unless a transport has it by then."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def handed_over(self, descriptor: int, mode: str) -> Any:
        self._open.discard(descriptor)
        return os.fdopen(descriptor, mode, buffering=0)

    def __enter__(self) -> _closing:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open:
            os.close(descriptor)


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
                if message.of != self.requests[message.sample].response.digest():
                    raise self._misplaced(message)
                self.outcomes[message.sample] |= message.outcome
                (self.final if message.final else self._begun_async).add(message.sample)
            elif isinstance(message, Calling):
                self.calling[message.sample] = message.term

    def _misplaced(self, message: Scored) -> IntegrityError:
        """What is said of a verdict that stands at a response that it was not given for."""
        owner = next((r.response.label for r in self.requests if r.response.digest() == message.of), "")
        label = self.requests[message.sample].response.label or "a sample"
        return IntegrityError(
            f"the reward of {label} belongs to {owner or 'another text'}: a reward worker's answers were swapped. "
            "Start again: the run continues from its last checkpoint. If it happens again, please report it"
        )

    def culprit(self) -> int | None:
        """The sample under way when the worker stopped; None when it may be any of several."""
        for index in range(len(self.requests)):
            if index not in self.final and index not in self._begun_async:
                return index
        unfinished = self._begun_async - self.final
        return unfinished.pop() if len(unfinished) == 1 else None


def _blamed(term: str, end: _End) -> RewardFailure:
    if end.had_its_time:
        return RewardFailure(term, end.problem, ended=True)
    if not end.outside:
        problem = f"{end.problem}; this happened twice, the second time with this sample alone"
        return RewardFailure(term, problem, ended=True)
    problem = (
        f"{end.problem}, twice in a row. The sender is unknown (the kernel if memory ran out, or another process), so "
        "neither the function nor the row is necessarily at fault"
    )
    return RewardFailure(term, problem, ended=True, lost=True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)
