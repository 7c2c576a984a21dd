"""How waiting samples are shared among the reward workers: in few messages, and evenly.

Each call is cut into one piece a worker. What waits when a worker is free (often all groups of a batch at once) goes to
it in one message: its fair share of it, but no more than it will be done with soon, so that slow samples don't make
others wait behind them while another worker has nothing to do.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rljob_trainer.rewards.process import WorkerProcess
from rljob_trainer.rewards.terms import Outcome, Response

_SOON_SECONDS = 0.1
"""About as long as a worker should be busy with one message of several pieces."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Samples that travel together; ``done`` is cancelled when nobody wants them any more."""

    responses: Sequence[Response]
    done: asyncio.Future[list[Outcome]]


class SharedWork:
    """The queue in front of the workers."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self._workers = len(workers)
        self._idle = list(workers)
        self._waiting: deque[_Piece] = deque()
        self._tasks: set[asyncio.Task[list[Outcome]]] = set()
        self._handing_out = False
        self._sample_seconds = math.inf
        """What one sample takes a worker, from the latest messages."""

    async def score(self, responses: Sequence[Response]) -> list[Outcome]:
        """One outcome per response, in order. Raises what ``WorkerProcess.score`` raises.

        Cancelling it ends the worker that has the samples, unless it has others too.
        """
        loop = asyncio.get_running_loop()
        size = math.ceil(len(responses) / self._workers)
        pieces = [
            _Piece(responses[start : start + size], loop.create_future()) for start in range(0, len(responses), size)
        ]
        self._waiting.extend(pieces)
        if not self._handing_out:
            # After everybody who is about to ask in this turn of the event loop.
            self._handing_out = True
            loop.call_soon(self._hand_out)
        try:
            return [outcome for piece in pieces for outcome in await piece.done]
        finally:
            for piece in pieces:
                piece.done.cancel()

    async def close(self) -> None:
        """Ends what is under way."""
        while self._waiting:
            self._waiting.popleft().done.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _hand_out(self) -> None:
        self._handing_out = False
        while self._waiting and self._idle:
            pieces = self._take()
            if not pieces:
                return
            worker = self._idle.pop()
            task = asyncio.create_task(self._work(worker, pieces), name="reward")
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, worker, pieces))
            for piece in pieces:
                piece.done.add_done_callback(partial(_stop_if_unwanted, task, pieces))

    def _take(self) -> list[_Piece]:
        """The next message's pieces; none when nobody wants those that wait."""
        samples = sum(len(piece.responses) for piece in self._waiting)
        most = min(math.ceil(samples / len(self._idle)), int(_SOON_SECONDS / self._sample_seconds))
        pieces: list[_Piece] = []
        taken = 0
        while self._waiting and (not pieces or taken + len(self._waiting[0].responses) <= most):
            piece = self._waiting.popleft()
            if not piece.done.done():
                pieces.append(piece)
                taken += len(piece.responses)
        return pieces

    async def _work(self, worker: WorkerProcess, pieces: Sequence[_Piece]) -> list[Outcome]:
        began = time.monotonic()
        outcomes = await worker.score([response for piece in pieces for response in piece.responses])
        seconds = max(1e-6, (time.monotonic() - began) / len(outcomes))
        known = self._sample_seconds
        self._sample_seconds = seconds if math.isinf(known) else (known + seconds) / 2
        return outcomes

    def _ended(self, worker: WorkerProcess, pieces: Sequence[_Piece], task: asyncio.Task[list[Outcome]]) -> None:
        self._tasks.discard(task)
        self._idle.append(worker)
        problem = None if task.cancelled() else task.exception()
        start = 0
        for piece in pieces:
            end = start + len(piece.responses)
            if not piece.done.done():
                if task.cancelled():
                    piece.done.cancel()
                elif problem is not None:
                    piece.done.set_exception(problem)
                else:
                    piece.done.set_result(task.result()[start:end])
            start = end
        self._hand_out()


def _stop_if_unwanted(
    task: asyncio.Task[list[Outcome]], pieces: Sequence[_Piece], _: asyncio.Future[list[Outcome]]
) -> None:
    """Stops all pieces, which nobody waits for and which may take long."""
    if not task.done() and all(piece.done.cancelled() for piece in pieces):
        task.cancel()
