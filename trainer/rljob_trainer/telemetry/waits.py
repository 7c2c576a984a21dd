"""What the run waits for at this moment: who waits, for what, since when, and when the wait becomes an error.

    with waits.wait("trainer", lambda: f"samples: {ready} of {wanted} groups are finished", seconds=3600):
        ...

Keeping the deadline is the business of whoever waits; here it is only known, so that status and live view can say it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """One wait. ``since`` and ``until`` are times of the clock that it was measured with."""

    who: str
    reason: Callable[[], str]
    since: float
    until: float | None

    @property
    def sentence(self) -> str:
        return f"{self.who} waits for {self.reason()}"


class Waits:
    """The waits that are under way. One event loop owns it."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[Wait, None] = {}

    @contextmanager
    def wait(self, who: str, reason: Callable[[], str] | str, seconds: float | None = None) -> Iterator[Wait]:
        """Inside, ``who`` waits for ``reason`` (a function is asked whenever somebody wants to know)."""
        now = self._clock()
        text = reason
        wait = Wait(
            who,
            text if callable(text) else lambda: str(text),
            now,
            None if seconds is None else now + seconds,
        )
        self._open[wait] = None
        try:
            yield wait
        finally:
            del self._open[wait]

    @property
    def latest(self) -> Wait | None:
        """The wait that began last: what is inside another one is its reason. None: nobody waits."""
        return next(reversed(self._open), None)

    def seconds(self, wait: Wait) -> float:
        """How long it has lasted."""
        return self._clock() - wait.since

    def left(self, wait: Wait) -> float | None:
        """Seconds until it becomes an error; None: it may last."""
        return None if wait.until is None else max(0.0, wait.until - self._clock())
