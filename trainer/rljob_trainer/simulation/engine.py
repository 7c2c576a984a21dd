"""A simulated engine: sequences that decode side by side, slower the more there are. Arithmetic only, no event loop.

All running sequences make one token per decoding step, and a step with b of them takes ``alone x (1 + b / saturation)``
seconds: reading the weights costs the same for one sequence as for many, until arithmetic and caches bind. Between two
changes of b all sequences advance together, so the engine's state is one number (``_progress``, tokens made by a
sequence that has been running since the beginning) and the sorted list of the values at which sequences end.

The engine keeps a time of its own, in which pauses do not exist: whoever owns it (``rollout.py``) freezes and thaws it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """``alone``: seconds per token of one sequence in an engine without others, in the limit. ``saturation``: the
    number of running sequences with which that doubles."""

    alone: float
    saturation: float

    def token_seconds(self, running: int) -> float:
        """Seconds of one decoding step."""
        return self.alone * (1 + running / self.saturation)

    def tokens_per_second(self, running: float) -> float:
        """Tokens per second of all running sequences together."""
        return running / (self.alone * (1 + running / self.saturation))


@dataclass(slots=True, eq=False)
class Work:
    """One prompt group in an engine."""

    ordinal: int
    lengths: Sequence[int]
    unstarted: int = 0
    running: int = 0
    first_version: int = -1
    """The policy version under which its first token was made; known when the group is handed over."""
    last_version: int = -1
    _began: float = field(default=0.0, repr=False)
    _ends: float = field(default=0.0, repr=False)
    """Progress at which the last of its started sequences ends."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class SimulatedEngine:
    """Decodes groups; ``advance`` returns those that have finished by a given time.

    Usage::

        engine.advance(now); engine.add(work, now)
        wake_up = engine.next_finish()          # nothing finishes before, unless something is added
        finished = engine.advance(wake_up)
    """

    def __init__(self, speed: DecodeSpeed, max_concurrent: int) -> None:
        self._alone = speed.alone
        self._slope = speed.alone / speed.saturation
        self._slots = max_concurrent
        self._now = 0.0
        self._progress = 0.0
        self._serial = 0
        # (-end, serial, group): the sequence that ends next is the last of the list.
        self._running: list[tuple[float, int, Work]] = []
        self._waiting: deque[tuple[Work, int]] = deque()
        self._done: deque[tuple[float, Work]] = deque()
        self._versions: tuple[list[float], list[int]] = ([0.0], [0])
        self.pending = 0
        """Sequences that have not been handed over as finished: running, waiting, or finished ahead of time."""
        self.busy_seconds = 0.0
        self.sequence_seconds = 0.0
        """Integral of the number of running sequences."""

    @property
    def running(self) -> int:
        return len(self._running)

    def serve(self, version: int, now: float) -> None:
        """From ``now`` on tokens are made under ``version``."""
        times, versions = self._versions
        times.append(now)
        versions.append(version)
        if len(times) > 256:
            del times[:128], versions[:128]

    def add(self, work: Work, now: float) -> None:
        """Queues a group; ``advance(now)`` must have been called."""
        self._now = max(self._now, now)
        self.pending += len(work.lengths)
        work.unstarted = len(work.lengths)
        self._waiting.extend((work, length) for length in work.lengths)
        self._fill()

    def cut(self, ordinal: int, now: float) -> bool:
        """A group ends with the tokens it has; ``advance(now)`` must have been called. Returns whether it was there and
        had any."""
        of_group = [sequence for sequence in self._running if sequence[2].ordinal == ordinal]
        if of_group:
            work = of_group[0][2]
            self._running = [sequence for sequence in self._running if sequence[2] is not work]
            self._waiting = deque(waiting for waiting in self._waiting if waiting[0] is not work)
            work.running = work.unstarted = 0
            self._now = max(self._now, now)
            self._done.append((self._now, work))
            self._fill()
        # It may have ended by itself, ahead of time.
        return bool(of_group) or any(work.ordinal == ordinal for _, work in self._done)

    def advance(self, now: float) -> list[Work]:
        """Goes to ``now`` and returns the groups that have finished, in the order in which they did."""
        while self._running and (end := self._next_end()) <= now:
            self._end_one(end)
        if now > self._now:
            self._pass(now - self._now)
            self._now = now
        finished = []
        while self._done and self._done[0][0] <= now:
            ended, work = self._done.popleft()
            # Only now: what has been computed ahead of time did not know of later publications.
            work.first_version, work.last_version = self._version_at(work._began), self._version_at(ended)
            self.pending -= len(work.lengths)
            finished.append(work)
        return finished

    def next_finish(self) -> float | None:
        """When the next group finishes if nothing is added; None without work."""
        # While others wait for a slot, additions only queue up behind them: what happens until then is certain.
        while not self._done and self._waiting:
            self._end_one(self._next_end())
        if self._done:
            return self._done[0][0]
        time, progress, running = self._now, self._progress, len(self._running)
        for negative, _, work in reversed(self._running):
            time += (-negative - progress) * (self._alone + self._slope * running)
            progress, running = -negative, running - 1
            if progress >= work._ends:
                return time
        return None

    def _next_end(self) -> float:
        running = self._running
        return self._now + (-running[-1][0] - self._progress) * (self._alone + self._slope * len(running))

    def _end_one(self, end: float) -> None:
        """Goes to ``end``, at which the sequence that ends next does."""
        self._pass(end - self._now)
        negative, _, work = self._running.pop()
        self._now, self._progress = end, -negative
        work.running -= 1
        if not work.running and not work.unstarted:
            self._done.append((end, work))
        if self._waiting:
            self._fill()

    def _pass(self, seconds: float) -> None:
        """Time goes by in which nothing ends."""
        running = len(self._running)
        if running:
            self._progress += seconds / (self._alone + self._slope * running)
            self.busy_seconds += seconds
            self.sequence_seconds += seconds * running

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            work, length = self._waiting.popleft()
            end = self._progress + length
            if work.unstarted == len(work.lengths):
                work._began, work._ends = self._now, end
            else:
                work._ends = max(work._ends, end)
            work.unstarted -= 1
            work.running += 1
            self._serial += 1
            insort(self._running, (-end, self._serial, work))

    def _version_at(self, time: float) -> int:
        times, versions = self._versions
        return versions[bisect_right(times, time) - 1]
