"""What the run waits for at this moment: who waits, for what, since when, and when the wait becomes an error.

    with waits.wait("trainer", lambda: f"{done}/{wanted} samples", seconds=3600, progress=lambda: last_sample_at):
        ...

Keeping the deadline is the business of whoever waits (``patiently`` helps); here it is only known, so that status and
live view can say it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass

Clock = Callable[[], float]

NEVER = float("-inf")
"""When something happened last that has not happened yet."""

OF_THE_RUN = ("trainer", "driver")
"""Who may wait in the run's own thread of events: what one of them waits for is what the run waits for."""


async def patiently(happened: asyncio.Event, deadline: Clock) -> None:
    """Until ``happened`` is set. Raises ``TimeoutError`` at the deadline, a time of the running loop that may move
    meanwhile."""
    while True:
        due = deadline()
        try:
            async with asyncio.timeout_at(due):
                await happened.wait()
                return
        except TimeoutError:
            if deadline() <= due:
                raise


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """One wait. Times are those of the clock that it was measured with."""

    who: str
    reason: Callable[[], str]
    since: float
    until: Callable[[], float | None]
    """When it becomes an error, as things stand; None: it may last."""

    @property
    def sentence(self) -> str:
        return f"{self.who} waits for {self.reason()}"


class Waits:
    """The waits that are under way. One event loop owns it."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._open: dict[Wait, None] = {}

    @contextmanager
    def wait(
        self,
        who: str,
        reason: Callable[[], str] | str,
        seconds: float | None = None,
        *,
        progress: Clock | None = None,
        until: Callable[[], float | None] | None = None,
    ) -> Iterator[Wait]:
        """Inside, ``who`` waits for ``reason`` (a function is asked whenever somebody wants to know).

        ``seconds`` count from the beginning, or from the last ``progress`` if that was later. ``until``: the deadline
        of somebody else, who is waited for.
        """
        now, text = self.clock(), reason

        def own() -> float | None:
            return None if seconds is None else seconds + (now if progress is None else max(now, progress()))

        wait = Wait(who, text if callable(text) else lambda: str(text), now, until or own)
        self._open[wait] = None
        try:
            yield wait
        finally:
            del self._open[wait]

    @property
    def latest(self) -> Wait | None:
        """The wait of the run that began last: what is inside another one is its reason. None: it waits for nobody."""
        return next((wait for wait in reversed(self._open) if wait.who in OF_THE_RUN), None)

    @property
    def beside(self) -> dict[str, Wait]:
        """What others wait for meanwhile, by who waits."""
        return {wait.who: wait for wait in self._open if wait.who not in OF_THE_RUN}

    def seconds(self, wait: Wait) -> float:
        """How long it has lasted."""
        return self.clock() - wait.since

    def left(self, wait: Wait) -> float | None:
        """Seconds until it becomes an error; None: it may last."""
        until = wait.until()
        return None if until is None else max(0.0, until - self.clock())


Taken = Callable[[str, str, float], AbstractAsyncContextManager[object]]
"""``taken(who, what, seconds)``: a time in which nobody else has taken the same thing; see ``Turn.taken``."""


class Turn:
    """A lock whose holder says what for, and until when at the latest: that is what those behind it wait for."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._lock = asyncio.Lock()
        self._what = ""
        self._until = NEVER

    @property
    def is_taken(self) -> bool:
        return self._lock.locked()

    @asynccontextmanager
    async def taken(self, who: str, what: str, seconds: float) -> AsyncIterator[None]:
        """Inside, ``who`` has it, and ``what`` (a clause: "engine 3 leaves") goes on, for no longer than ``seconds``:
        keeping to that is the holder's business."""
        if self._lock.locked():
            # One that waits before this one may have it next.
            with self._waits.wait(who, lambda: f"its turn, while {self._what}", until=lambda: self._until):
                await self._lock.acquire()
        else:
            await self._lock.acquire()
        self._what, self._until = what, self._waits.clock() + seconds
        try:
            yield
        finally:
            self._lock.release()
