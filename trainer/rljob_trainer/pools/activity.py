"""When each engine had requests in hand: the engines' rows of the timeline, and the share of time they had none.

A span lasts from an engine's first request to its last, and is cut where the weights change, so that a row shows under
which version the engine sampled and where it had nothing to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Report = Callable[[str, str, float, float], None]
"""(row, name, start, end), times in seconds since 1970: ``Trace.span``."""


@dataclass(frozen=True, slots=True)
class _Working:
    version: int
    since: float


@dataclass(slots=True)
class _Lap:
    """One engine since the idle ratio was asked for last."""

    began: float
    busy_seconds: float = 0.0
    working: _Working | None = None


class Activity:
    """Follows engines by name."""

    def __init__(self, report: Report | None = None, clock: Callable[[], float] = time.time) -> None:
        """``report`` is told each span of work: engine, version, and from when to when."""
        self._report = report
        self._clock = clock
        self._laps: dict[str, _Lap] = {}

    def follow(self, engine: str, version: int, *, busy: bool) -> None:
        """Notes how things stand now: whether the engine has requests, and under which version they are sampled."""
        now = self._clock()
        lap = self._laps.setdefault(engine, _Lap(now))
        if lap.working is not None and (not busy or lap.working.version != version):
            self._end(engine, lap, now)
        if busy and lap.working is None:
            lap.working = _Working(version, now)

    def forget(self, engine: str) -> None:
        """The engine is gone."""
        lap = self._laps.pop(engine, None)
        if lap is not None and lap.working is not None:
            self._end(engine, lap, self._clock())

    def take_idle_ratio(self) -> float | None:
        """Share of the time since the last call in which engines had no request, mean over those that are there."""
        now = self._clock()
        shares = []
        for engine, lap in self._laps.items():
            # What goes on was busy from its start, or from the last call if that was later.
            busy = lap.busy_seconds + (0.0 if lap.working is None else now - max(lap.working.since, lap.began))
            if now > lap.began:
                shares.append(1.0 - min(1.0, busy / (now - lap.began)))
            self._laps[engine] = _Lap(now, working=lap.working)
        return sum(shares) / len(shares) if shares else None

    def _end(self, engine: str, lap: _Lap, now: float) -> None:
        working, lap.working = lap.working, None
        assert working is not None
        lap.busy_seconds += now - max(working.since, lap.began)
        if self._report is not None:
            self._report(f"engine {engine}", f"version {working.version}", working.since, now)
