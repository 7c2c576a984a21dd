"""When each engine had requests in hand: the engines' rows of the timeline.

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


class Activity:
    """Follows engines by name. Whoever wants to know sets ``report``."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.report: Report | None = None
        self._clock = clock
        self._working: dict[str, _Working] = {}

    def follow(self, engine: str, version: int, *, busy: bool) -> None:
        """As things stand now: whether the engine has requests, and under which version they are sampled."""
        begun = self._working.get(engine)
        if begun is not None and (not busy or begun.version != version):
            del self._working[engine]
            if self.report is not None:
                self.report(f"engine {engine}", f"version {begun.version}", begun.since, self._clock())
        if busy and engine not in self._working:
            self._working[engine] = _Working(version, self._clock())
