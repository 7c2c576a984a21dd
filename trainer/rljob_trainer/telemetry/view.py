"""What a person sees while a job runs: the interface and the facts shown.

    with open_view() as view:
        view.start(JobSummary(name="quickstart", algorithm="grpo", model="llama, 0.3 M parameters", total_steps=200))
        view.show(Present("trainer waits for 12/32 samples; oldest running 4 s on engine 0"))
        view.step(StepRecord(step=1, metrics={"reward/mean": 0.1}))

``live.py`` draws a terminal, ``plain.py`` prints lines, ``open_view.py`` chooses between them. Both get every call from
the driver's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The job in a few words. ``total_steps`` None: the job stops for another reason (time, reward)."""

    name: str
    algorithm: str
    model: str
    mode: str = "sync"
    output: str = ""
    total_steps: int | None = None
    first_step: int = 1
    """The first step this process trains; more than 1 after a resume."""
    note: str = ""
    """One more fact worth the top line, such as ``resumed at step 40``."""


@dataclass(frozen=True, slots=True)
class ShownStep:
    """One finished step: its metrics under their public names."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Present:
    """This moment of a run, in the words of `rljob status`."""

    doing: str
    """What the trainer does or waits for, in one sentence."""
    engines: Sequence[str] = ()
    """What the engines do or wait for: one line for all that do the same."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Of the last ten minutes by stage (``StageTimes``)."""


class View(Protocol):
    """Shows a run. ``close`` may be called more than once, and leaves the terminal as it was."""

    def start(self, job: JobSummary) -> None: ...

    def step(self, record: ShownStep) -> None: ...

    def message(self, text: str) -> None:
        """A log line for the person watching."""
        ...

    def show(self, now: Present) -> None:
        """What goes on at this moment. Called every second."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Views:
    """Several views as one."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = tuple(views)

    def start(self, job: JobSummary) -> None:
        for view in self._views:
            view.start(job)

    def step(self, record: ShownStep) -> None:
        for view in self._views:
            view.step(record)

    def message(self, text: str) -> None:
        for view in self._views:
            view.message(text)

    def show(self, now: Present) -> None:
        for view in self._views:
            view.show(now)

    def close(self) -> None:
        for view in self._views:
            view.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


VALIDATION_MEAN = "validation/mean"


def validation_score(metrics: Mapping[str, float]) -> float | None:
    """The step's validation in one number, if it had one: ``validation/mean``."""
    return metrics.get(VALIDATION_MEAN)


class Pace:
    """How fast steps come and when the last one will: from the times of the latest steps, pauses included."""

    def __init__(
        self,
        total_steps: int | None,
        first_step: int = 1,
        clock: Callable[[], float] = time.monotonic,
        latest: int = 50,
    ) -> None:
        self._clock = clock
        self._total = total_steps
        self._began = clock()
        self._times: deque[tuple[int, float]] = deque([(first_step - 1, self._began)], maxlen=latest + 1)
        self._warm = False
        """Whether the first step, which also waits for parts that start, has been left out for later ones."""

    @property
    def elapsed(self) -> float:
        """Seconds since the start of this process's first step."""
        return self._clock() - self._began

    def step(self, step: int, seconds: float | None = None) -> None:
        """Takes note of the end of a step, which took ``seconds``. One before the first (validation at the start) moves
        the start instead, and so does the first one: before it parts were started."""
        if step <= self._times[-1][0]:
            self._times.pop()
        elif len(self._times) == 1 and seconds is not None:
            self._times[0] = (step - 1, self._clock() - seconds)
        self._times.append((step, self._clock()))
        if not self._warm and len(self._times) == 3:
            self._times.popleft()
            self._warm = True

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of the latest steps; None before the first."""
        (first, began), (last, ended) = self._times[0], self._times[-1]
        return (ended - began) / (last - first) if last > first else None

    @property
    def remaining(self) -> float | None:
        """Seconds to the last step, counted from now; None when that is not known."""
        pace, (last, ended) = self.step_seconds, self._times[-1]
        if self._total is None or pace is None:
            return None
        return max(0.0, (self._total - last) * pace - (self._clock() - ended))
