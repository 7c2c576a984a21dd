"""A process that calls reward functions, so that one that hangs or crashes takes nothing else with it.

Started as ``python -m rljob_trainer.rewards.worker FD``; talks pickled frames (``frames.py``) over its standard input
and output, with an outbox in the shared memory behind the file descriptor FD. What the functions print goes to standard
error. It never imports torch. It ends when the driver closes the pipe, and is killed by the kernel should the driver
die while a function hangs.

Functions may do anything to their process. What they fork never answers for it (``Outbox``), signals that they send to
it are told from those of others (``_note_own_signals``), and one that takes its descriptors away is named.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from rljob_trainer.errors import JobFileError
from rljob_trainer.rewards.child import die_with_parent, take_over_pipes
from rljob_trainer.rewards.frames import Calling, Outbox, Ready, Request, Scored, Setup, SharedMemory, read_frame
from rljob_trainer.rewards.rules import RewardVerdict
from rljob_trainer.rewards.terms import Outcome, Response, RewardFailure, Term

_LATE_SECONDS = 0.5
"""A timer that comes so late was held up, perhaps because the machine was paused: the driver is about to notice too."""
_BROKEN = 70
"""Exit code after an exception that no function's call let through."""


def main() -> None:
    die_with_parent()
    # Ctrl-C is the driver's: a KeyboardInterrupt in here is one that a function raises itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    incoming, outgoing = take_over_pipes()
    # Functions may start processes of their own, which have no business here.
    os.set_inheritable(descriptor := int(sys.argv[1]), False)
    memory = SharedMemory(os.fdopen(descriptor, "rb+"))
    outbox = Outbox(outgoing, memory)
    _keep_from_children([incoming.fileno(), outgoing.fileno()])
    setup = read_frame(incoming)
    if not isinstance(setup, Setup):
        return
    _note_own_signals(memory)
    worker = _Worker(setup, incoming, outgoing, outbox, memory)
    try:
        worker.serve()
    except BrokenPipeError:
        # The driver is gone; nobody is left to hear about it.
        os._exit(0)
    except BaseException:  # noqa: BLE001  what a task of a function raised into the event loop, for example
        outbox.end_escaped_child()
        traceback.print_exc()
        os._exit(_BROKEN)


class _Sample:
    """A sample while its functions are called."""

    def __init__(self, index: int, request: Request, terms: Sequence[Term]) -> None:
        self.index = index
        self.response = request.response
        self.terms = [t for t in terms if t.spec.name not in request.skip and t.applies_to(request.response.source)]
        self.outcome: Outcome = {}
        self.deadline = 0.0


class _Worker:
    """Calls the functions for one batch of samples after the other."""

    def __init__(
        self, setup: Setup, incoming: BinaryIO, outgoing: BinaryIO, outbox: Outbox, memory: SharedMemory
    ) -> None:
        self._setup = setup
        self._incoming = incoming
        self._outbox = outbox
        self._memory = memory
        self._terms: list[Term] = []
        self._guarded = [0, 1, 2, incoming.fileno(), outgoing.fileno()]
        self._at_first = self._descriptors()

    def serve(self) -> None:
        try:
            self._terms = [Term(spec) for spec in self._setup.terms]
        except JobFileError as problem:
            self._outbox.post(Ready(str(problem)))
            self._outbox.flush()
            return
        for term in self._terms:
            term.prepare()
        self._outbox.post(Ready())
        self._outbox.flush()
        # What modules do to the standard streams when they are imported is nobody's mistake.
        self._at_first = self._descriptors()
        with asyncio.Runner(loop_factory=self._event_loop) as runner:
            while (batch := read_frame(self._incoming)) is not None:
                self._score(batch, runner)
                self._outbox.flush()

    def _score(self, batch: Sequence[Request], runner: asyncio.Runner) -> None:
        """Plain functions sample by sample, in order; then all async ones together, which mostly wait for others."""
        waiting: list[_Sample] = []
        for index, request in enumerate(batch):
            sample = _Sample(index, request, self._terms)
            sample.deadline = self._clock() + self._setup.timeout_seconds
            for term in sample.terms:
                if not term.is_async:
                    self._announce(sample, term)
                    sample.outcome[term.spec.name] = self._called(term, sample.response)
            final = not any(term.is_async for term in sample.terms)
            if not final:
                waiting.append(sample)
            self._outbox.post(Scored(index, sample.outcome, sample.response.digest(), final))
            self._end_if_robbed()
        if waiting:
            runner.run(self._score_async(waiting))

    def _called(self, term: Term, response: Response) -> RewardVerdict | RewardFailure | None:
        verdict = term.score(response)
        self._outbox.end_escaped_child()
        if self._descriptors() != self._at_first:
            problem = (
                "it closed or replaced file descriptors of its worker process (0, 1, 2, or the pipes of the driver)"
            )
            return RewardFailure(term.spec.name, problem, ended=True)
        return verdict

    async def _score_async(self, samples: Sequence[_Sample]) -> None:
        async def one(sample: _Sample) -> None:
            outcome: Outcome = {}
            for term in sample.terms:
                if term.is_async:
                    self._announce(sample, term)
                    outcome[term.spec.name] = await self._within_time(term, sample)
                    # Several were under way: the driver finds the one by calling them singly.
                    self._end_if_robbed()
            self._outbox.post(Scored(sample.index, outcome, sample.response.digest()))

        async with asyncio.TaskGroup() as tasks:
            for sample in samples:
                tasks.create_task(one(sample))

    async def _within_time(self, term: Term, sample: _Sample) -> RewardVerdict | RewardFailure | None:
        """An async function's verdict within the sample's time, in which its process was able to run."""
        late = RewardFailure(term.spec.name, f"no result within {self._setup.timeout_seconds:g} s")
        if self._clock() >= sample.deadline:
            return late
        call = asyncio.ensure_future(term.score_async(sample.response))
        while (left := sample.deadline - self._clock()) > 0:
            asked = time.monotonic()
            if (await asyncio.wait({call}, timeout=left))[0]:
                return call.result()
            if time.monotonic() - asked > left + _LATE_SECONDS:
                await asyncio.wait({call}, timeout=_LATE_SECONDS)
        # A function may keep its cancellation to itself. Then it goes on, and nobody waits for it.
        call.cancel()
        return call.result() if call.done() and not call.cancelled() else late

    def _announce(self, sample: _Sample, term: Term) -> None:
        if len(sample.terms) > 1:
            self._outbox.post(Calling(sample.index, term.spec.name))

    def _clock(self) -> float:
        """Time that stands still while the process is stopped."""
        return time.monotonic() - self._memory.stopped_seconds

    def _descriptors(self) -> list[tuple[int, int] | None]:
        """What is behind the descriptors that this process needs."""
        found: list[tuple[int, int] | None] = []
        for descriptor in self._guarded:
            try:
                status = os.fstat(descriptor)
            except OSError:
                found.append(None)
            else:
                found.append((status.st_dev, status.st_ino))
        return found

    def _end_if_robbed(self) -> None:
        """The driver reads what was posted from the shared memory, and starts another worker."""
        if self._descriptors() != self._at_first:
            os._exit(_BROKEN)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(_OwnSelector(self._outbox.end_escaped_child))


class _OwnSelector(selectors.DefaultSelector):
    """Ends a forked child that goes on with the event loop of its parent, whose events it would take."""

    def __init__(self, end_escaped_child: Callable[[], None]) -> None:
        super().__init__()
        self._end_escaped_child = end_escaped_child

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._end_escaped_child()
        found: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        return found


def _keep_from_children(descriptors: Sequence[int]) -> None:
    """A child that a function forks has no part in the pipes: it can neither answer nor hold them open."""

    def let_go() -> None:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in descriptors:
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)

    os.register_at_fork(after_in_child=let_go)


def _note_own_signals(memory: SharedMemory) -> None:
    """Remembers the last signal that Python code of this process, or of a child forked by it, sends to this process:
    when the process dies of that one, nobody else has killed it."""
    own = os.getpid()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.kill", "os.killpg"):
            target, number = arguments
            if target in (own, 0, -1, -own):
                memory.own_signal = int(number)
        elif event == "signal.pthread_kill" and os.getpid() == own:
            memory.own_signal = int(arguments[1])

    sys.addaudithook(note)


if __name__ == "__main__":
    main()
