"""A process that calls reward functions, so that one that hangs or crashes takes nothing else with it.

Started as ``python -m rljob_trainer.rewards.worker FD``; talks pickled frames (``frames.py``) over its standard input
and output, with an outbox in the shared memory behind the file descriptor FD. What the functions print goes to standard
error. It never imports torch. It ends when the driver closes the pipe, and is killed by the kernel should the driver
die while a function hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO

from rljob_trainer.errors import JobFileError
from rljob_trainer.rewards.frames import Calling, Outbox, Ready, Request, Scored, Setup, SharedMemory, read_frame
from rljob_trainer.rewards.terms import Failure, Outcome, Term


def main() -> None:
    _die_with_parent()
    incoming, outgoing = _take_over_pipes()
    # Functions may start processes of their own, which have no business here.
    os.set_inheritable(descriptor := int(sys.argv[1]), False)
    outbox = Outbox(outgoing, SharedMemory(os.fdopen(descriptor, "rb+")))
    setup = read_frame(incoming)
    if not isinstance(setup, Setup):
        return
    try:
        _serve(setup, incoming, outbox)
    except BrokenPipeError:
        # The driver is gone; nobody is left to hear about it.
        os._exit(0)


def _serve(setup: Setup, incoming: BinaryIO, outbox: Outbox) -> None:
    try:
        terms = [Term(spec) for spec in setup.terms]
    except JobFileError as problem:
        outbox.post(Ready(str(problem)))
        outbox.flush()
        return
    for term in terms:
        term.prepare()
    outbox.post(Ready())
    outbox.flush()
    with asyncio.Runner() as runner:
        while (batch := read_frame(incoming)) is not None:
            _score(batch, terms, setup.timeout_seconds, outbox, runner)
            outbox.flush()


class _Sample:
    """A sample while its functions are called."""

    def __init__(self, index: int, request: Request, terms: Sequence[Term]) -> None:
        self.index = index
        self.response = request.response
        self.terms = [t for t in terms if t.spec.name not in request.skip and t.applies_to(request.response.source)]
        self.outcome: Outcome = {}
        self.seconds_left = 0.0


def _score(
    batch: Sequence[Request], terms: list[Term], timeout_seconds: float, outbox: Outbox, runner: asyncio.Runner
) -> None:
    """Plain functions sample by sample, in order; then all async ones together, which mostly wait for somebody else."""
    waiting: list[_Sample] = []
    for index, request in enumerate(batch):
        begin = time.monotonic()
        sample = _Sample(index, request, terms)
        for term in sample.terms:
            if not term.is_async:
                _announce(sample, term, outbox)
                sample.outcome[term.spec.name] = term.score(sample.response)
        final = not any(term.is_async for term in sample.terms)
        if not final:
            sample.seconds_left = timeout_seconds - (time.monotonic() - begin)
            waiting.append(sample)
        outbox.post(Scored(index, sample.outcome, final))
    if waiting:
        runner.run(_score_async(waiting, timeout_seconds, outbox))


async def _score_async(samples: Sequence[_Sample], timeout_seconds: float, outbox: Outbox) -> None:
    async def one(sample: _Sample) -> None:
        asked = [term for term in sample.terms if term.is_async]
        too_late = f"no result within {timeout_seconds:g} s"
        outcome: Outcome = {term.spec.name: Failure(term.spec.name, too_late) for term in asked}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(sample.seconds_left):
                for term in asked:
                    _announce(sample, term, outbox)
                    outcome[term.spec.name] = await term.score_async(sample.response)
        outbox.post(Scored(sample.index, outcome))

    async with asyncio.TaskGroup() as tasks:
        for sample in samples:
            tasks.create_task(one(sample))


def _announce(sample: _Sample, term: Term, outbox: Outbox) -> None:
    if len(sample.terms) > 1:
        outbox.post(Calling(sample.index, term.spec.name))


def _die_with_parent() -> None:
    """Asks the kernel (Linux) to kill this process when the driver is gone: a hanging function reads no pipe."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Moves the two pipes out of the functions' reach: they read nothing and print to standard error."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return incoming, outgoing


if __name__ == "__main__":
    main()
