"""Where the driver's time goes: stages with totals and recent shares, and a timeline for Perfetto.

    times = StageTimes()
    with times.stage("step"):
        with times.stage("generate"):
            ...
    times.lap()      # {"step": 1.9, "generate": 1.2}: seconds since the last lap, for the metrics
    times.shares()   # {"generate": 0.63, ...}: of the last ten minutes, for the live view
    times.trace.span("engine 0", "generate", started, ended)    # measured by somebody else
    times.trace.write(folder / "timeline.json")

Memory is bounded: shares live in a fixed number of buckets, the timeline keeps the latest spans only. Stages may
nest, and tasks of asyncio may be in different stages at once. Not thread-safe: one event loop owns it.
"""

from __future__ import annotations

import contextvars
import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rljob_trainer.telemetry.catalogue import NESTED_STAGES, STAGES
from rljob_trainer.telemetry.run_folder import write_whole

Clock = Callable[[], float]


class Stopwatch:
    """``with Stopwatch() as watch: ...``, then ``watch.seconds``; inside, the seconds so far."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._end: float | None = None

    def __enter__(self) -> Stopwatch:
        self._start, self._end = self._clock(), None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end = self._clock()

    @property
    def seconds(self) -> float:
        return (self._clock() if self._end is None else self._end) - self._start


@dataclass(slots=True, eq=False)
class _Frame:
    """A stage that is under way; ``inner`` are the seconds its nested stages have taken."""

    name: str
    start: float
    outer: _Frame | None
    inner: float = 0.0


TRAINER, PUBLICATION = "trainer", "publication"


def row_of(stage: str) -> str:
    """The row of the timeline that a stage belongs to: one for each of the learner's, one for publications, and the
    trainer's for what is done in the driver and for its waits."""
    whole = NESTED_STAGES.get(stage, stage)
    if whole in ("score", "update"):
        return f"learner {whole}"
    return PUBLICATION if whole == "publish" else TRAINER


class StageTimes:
    """Seconds by stage. ``stage`` measures; ``totals``, ``lap`` and ``shares`` report.

    Totals and laps count a stage whole, shares count it without the stages nested in it, so that they add up.
    """

    def __init__(self, *, window: float = 600.0, clock: Clock = time.monotonic, wall_clock: Clock = time.time) -> None:
        self._clock = clock
        self._wall_offset = wall_clock() - clock()
        self._began = clock()
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._exclusive: defaultdict[str, float] = defaultdict(float)
        self._at_last_lap: dict[str, float] = {}
        self._recent = _RecentSeconds(window)
        self._open: dict[_Frame, None] = {}
        self._current: contextvars.ContextVar[_Frame | None] = contextvars.ContextVar("stage", default=None)
        self.trace = Trace()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures what is inside under a name of ``catalogue.STAGES`` and draws it into its row of the timeline."""
        if name not in STAGES:
            raise ValueError(f"{name!r} is not a stage; telemetry/catalogue.py lists them: {', '.join(STAGES)}")
        outer = self._current.get()
        frame = _Frame(name, self._clock(), outer)
        token = self._current.set(frame)
        self._open[frame] = None
        try:
            yield
        finally:
            end = self._clock()
            self._current.reset(token)
            del self._open[frame]
            if outer is not None:
                outer.inner += end - frame.start
            self._totals[name] += end - frame.start
            # Tasks that were started inside a stage can together take longer than it did.
            alone = max(0.0, end - frame.start - frame.inner)
            self._exclusive[name] += alone
            self._recent.add(name, frame.start, end, alone)
            self.trace.span(row_of(name), name, frame.start + self._wall_offset, end + self._wall_offset)

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by stage since the beginning, finished stages only."""
        return dict(self._totals)

    @property
    def exclusive_totals(self) -> dict[str, float]:
        """Seconds by stage without the stages nested in each: they add up, which is what ``summary.json`` shows."""
        return dict(self._exclusive)

    @property
    def current(self) -> tuple[str, float] | None:
        """The innermost stage that is under way, and for how many seconds; None between stages."""
        frame = next(reversed(self._open), None)
        return None if frame is None else (frame.name, self._clock() - frame.start)

    def lap(self) -> dict[str, float]:
        """Seconds by stage since the previous lap; stages that did not run are left out."""
        lap = {name: seconds - self._at_last_lap.get(name, 0.0) for name, seconds in self._totals.items()}
        self._at_last_lap = dict(self._totals)
        return {name: seconds for name, seconds in lap.items() if seconds > 0}

    def shares(self) -> dict[str, float]:
        """Share of the last ten minutes by stage, largest first, what no stage claims as ``other``; the sum is one.

        ``step`` itself is no stage of the answer: what its parts leave is ``other``. When stages overlap, they are
        shares of the sum.
        """
        now = self._clock()
        since = max(self._began, self._recent.since(now))
        seconds = self._recent.total(now)
        inner = {frame: frame.inner for frame in self._open}
        for frame in self._open:
            if frame.outer in inner:
                inner[frame.outer] += now - frame.start
        for frame in self._open:
            seconds[frame.name] += min(max(0.0, now - frame.start - inner[frame]), now - since)
        seconds.pop("step", None)
        other = seconds.pop("other", 0.0) + max(0.0, now - since - sum(seconds.values()))
        whole = sum(seconds.values()) + other
        if whole <= 0:
            return {}
        ranked = sorted(((name, value / whole) for name, value in seconds.items()), key=lambda entry: -entry[1])
        return {name: share for name, share in [*ranked, ("other", other / whole)] if share > 0}


class _RecentSeconds:
    """Seconds by name over the last ``window`` seconds, in at most 61 buckets."""

    _BUCKETS = 60

    def __init__(self, window: float) -> None:
        self._window = window
        self._width = window / self._BUCKETS
        self._buckets: dict[int, defaultdict[str, float]] = {}

    def add(self, name: str, start: float, end: float, seconds: float) -> None:
        """Spreads ``seconds`` evenly over the time from ``start`` to ``end``."""
        first, last = int(start // self._width), int(end // self._width)
        for index in range(max(first, last - self._BUCKETS), last + 1):
            overlap = min(end, (index + 1) * self._width) - max(start, index * self._width)
            part = seconds * (overlap / (end - start) if end > start else 1.0)
            self._buckets.setdefault(index, defaultdict(float))[name] += part
        self._forget(end)

    def total(self, now: float) -> defaultdict[str, float]:
        self._forget(now)
        total: defaultdict[str, float] = defaultdict(float)
        for bucket in self._buckets.values():
            for name, seconds in bucket.items():
                total[name] += seconds
        return total

    def since(self, now: float) -> float:
        """Where the oldest bucket that still counts begins: at most ``window`` seconds before ``now``."""
        return (int((now - self._window) // self._width) + 1) * self._width

    def _forget(self, now: float) -> None:
        oldest = round(self.since(now) / self._width)
        for index in [index for index in self._buckets if index < oldest]:
            del self._buckets[index]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from ``start`` to ``end`` (seconds since 1970) in one row of the timeline."""

    row: str
    name: str
    start: float
    end: float


class Trace:
    """The latest spans of a run, written in the trace format of Chrome, which Perfetto (ui.perfetto.dev) opens."""

    def __init__(self, limit: int = 50_000) -> None:
        self._spans: deque[Span] = deque(maxlen=limit)
        self._dropped = 0

    def span(self, row: str, name: str, start: float, end: float) -> None:
        """Adds a span; ``start`` and ``end`` are seconds since 1970 on any machine of the run."""
        if len(self._spans) == self._spans.maxlen:
            self._dropped += 1
        self._spans.append(Span(row, name, start, max(start, end)))

    def write(self, path: Path) -> None:
        """Writes the timeline in one move. Raises ``OutputError``."""
        write_whole(path, json.dumps(self.document()))

    def document(self) -> dict[str, Any]:
        """The timeline as a JSON object; times are microseconds since the first span that is kept."""
        origin = min((span.start for span in self._spans), default=0.0)
        events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "rljob"}}]
        for thread, (label, spans) in enumerate(self._lanes(), start=1):
            place = {"pid": 1, "tid": thread}
            events.append({"ph": "M", **place, "name": "thread_name", "args": {"name": label}})
            events.append({"ph": "M", **place, "name": "thread_sort_index", "args": {"sort_index": thread}})
            for span in spans:
                start, length = round((span.start - origin) * 1e6), round((span.end - span.start) * 1e6)
                events.append({"ph": "X", **place, "name": span.name, "cat": span.row, "ts": start, "dur": length})
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"earlier_spans_dropped": self._dropped}}

    def _lanes(self) -> Iterator[tuple[str, list[Span]]]:
        """The rows in order of first use, split where spans cross: a row may only hold spans that nest."""
        rows: dict[str, list[Span]] = defaultdict(list)
        for span in self._spans:
            rows[span.row].append(span)
        for row, spans in rows.items():
            for number, lane in enumerate(_nesting_lanes(spans), start=1):
                yield row if number == 1 else f"{row} ({number})", lane


def _nesting_lanes(spans: list[Span]) -> list[list[Span]]:
    lanes: list[tuple[list[Span], list[float]]] = []  # spans, ends of those still open
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        for placed, ends in lanes:
            while ends and ends[-1] <= span.start:
                ends.pop()
            if not ends or span.end <= ends[-1]:
                placed.append(span)
                ends.append(span.end)
                break
        else:
            lanes.append(([span], [span.end]))
    return [placed for placed, _ in lanes]
