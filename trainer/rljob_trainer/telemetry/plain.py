"""The view for pipes, files and logs: one aligned line a step, under a line that says what the columns are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from rljob_trainer.secret_values import masked
from rljob_trainer.telemetry.figures import clock, number, percent
from rljob_trainer.telemetry.view import JobSummary, Pace, Present, ShownStep, validation_score


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    show: Callable[[Mapping[str, float]], str]


def _value(name: str) -> Callable[[Mapping[str, float]], str]:
    return lambda metrics: number(metrics.get(name))


def _share(name: str) -> Callable[[Mapping[str, float]], str]:
    return lambda metrics: percent(metrics.get(name))


_COLUMNS = (
    _Column("reward", 7, _value("reward/mean")),
    _Column("valid", 7, lambda metrics: number(validation_score(metrics))),
    _Column("length", 6, _value("response/length/mean")),
    _Column("cut", 5, _share("response/length/clip_ratio")),
    _Column("entropy", 7, _value("actor/entropy")),
    _Column("kl", 7, lambda metrics: number(metrics.get("kl/reference", metrics.get("kl/in_loss")))),
    _Column("clip", 5, _share("actor/clip_fraction")),
    _Column("grad", 6, _value("actor/grad_norm")),
    _Column("age", 3, _value("age/max")),
    _Column("tok/s", 6, _value("throughput/tokens_per_second")),
    _Column("step s", 6, _value("timing/step_seconds")),
)


class PlainView:
    """Prints to ``stream``. What goes on is only printed after ``patience`` quiet seconds, and then once as often."""

    def __init__(
        self, stream: TextIO, *, patience: float = 60.0, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._patience = patience
        self._clock = monotonic
        self._job = JobSummary(name="", algorithm="", model="")
        self._pace = Pace(None, clock=monotonic)
        self._quiet_since = monotonic()

    def start(self, job: JobSummary) -> None:
        self._job = job
        self._pace = Pace(job.total_steps, job.first_step, self._clock)
        facts = [job.algorithm, job.model, job.mode, job.note, f"output {job.output}" if job.output else ""]
        self._print(f"{job.name}: {', '.join(fact for fact in facts if fact)}")
        titles = "".join(f"  {column.title:>{column.width}}" for column in _COLUMNS)
        self._print(f"{'step':>{self._step_width}}{titles}  {'left':>6}")

    def step(self, record: ShownStep) -> None:
        self._pace.step(record.step, record.metrics.get("timing/step_seconds"))
        total = f"/{self._job.total_steps}" if self._job.total_steps else ""
        cells = "".join(f"  {column.show(record.metrics):>{column.width}}" for column in _COLUMNS)
        self._print(f"{f'{record.step}{total}':>{self._step_width}}{cells}  {clock(self._pace.remaining):>6}")

    @property
    def _step_width(self) -> int:
        total = self._job.total_steps
        return max(6, 2 * len(str(total)) + 1 if total else 0)

    def message(self, text: str) -> None:
        self._print(text)

    def show(self, now: Present) -> None:
        if self._clock() - self._quiet_since >= self._patience:
            self._print("; ".join([now.doing, *now.engines]))

    def _print(self, line: str) -> None:
        self._quiet_since = self._clock()
        print(masked(line), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to restore."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
