"""The engines' turn on devices that they share with the learner: when an engine may start, and get its first weights.

An engine that starts measures what is free and takes its share of the device; one that gets its first weights is awake.
Neither can be while the learner has the device, and the learner cannot come while either is under way:

    async with turn.starting("0"):    # waits until it is the engines' turn
        ...                           # the successor of engine 0 starts, and is in the pool when this ends
    with turn.at_work("engine 0.1", 300.0):  # only while ``turn.is_on``
        ...                           # it gets its first weights
    await turn.end()                  # nobody begins any more, and who has begun is through

There is one turn for all devices of a run. Where nothing is shared it is always the engines'.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from rljob_trainer.errors import DeadlineError
from rljob_trainer.waits import Waits


class EnginesTurn:
    """On at first. One event loop owns it."""

    def __init__(self, waits: Waits | None = None, *, start_seconds: float = 600.0) -> None:
        """``start_seconds``: what each of the two calls may take that an engine's start is made of, its building and
        the question where it is (``RayEngine.start``)."""
        self._waits = waits or Waits()
        self._seconds = 2 * start_seconds
        self._on = asyncio.Event()
        self._on.set()
        self._at_work: dict[str, float] = {}
        """Who has begun what keeps the learner away, and when that ends at the latest."""
        self._through = asyncio.Event()
        """Set when nobody is at work any more."""

    @property
    def is_on(self) -> bool:
        """Whether the devices are the engines'."""
        return self._on.is_set()

    @asynccontextmanager
    async def starting(self, lost: str) -> AsyncIterator[None]:
        """Inside, the successor of the engine named ``lost`` starts. Waits for the engines' turn, however long the
        learner's lasts. Raises ``DeadlineError`` when the start outlasts its deadlines: the learner waits for it."""
        who = f"the successor of engine {lost}"
        while not self.is_on:  # it may be over again when this one is woken
            with self._waits.wait(who, "the learner to release the shared devices"):
                await self._on.wait()
        limit = asyncio.timeout(self._seconds)
        with self.at_work(who, self._seconds):
            try:
                async with limit:
                    yield
            except TimeoutError:
                if not limit.expired():
                    raise
                raise DeadlineError(
                    f"{who} neither started nor failed within {self._seconds:.0f} s (twice deadlines.startSeconds); "
                    "check Ray's log to see where it hangs"
                ) from None

    @contextmanager
    def at_work(self, who: str, seconds: float) -> Iterator[None]:
        """Inside, ``who`` does what has to be through before the learner comes, for no longer than ``seconds``: keeping
        to that is its own business."""
        self._at_work[who] = self._waits.clock() + seconds
        try:
            yield
        finally:
            del self._at_work[who]
            if not self._at_work:
                self._through.set()

    def begin(self) -> None:
        """The learner has left the devices."""
        self._on.set()

    async def end(self) -> None:
        """From now on nobody starts; returns when nobody is at work."""
        self._on.clear()
        while self._at_work:
            self._through.clear()
            with self._waits.wait("trainer", self._reason, until=lambda: max(self._at_work.values(), default=None)):
                await self._through.wait()

    def _reason(self) -> str:
        """Who is waited for."""
        return f"{', '.join(self._at_work)} to finish, so that the learner can take the shared devices"
