"""The view for a terminal: a few lines at the bottom that keep up with the run, log lines scrolling above them.

Drawn by a thread of its own that sleeps until something has changed, and then at most twice a second (5 ms each): the
run never waits for the terminal. The only state changed there is the hidden cursor, which comes back on ``close``, at
exit and on signals that would end the process.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rljob_trainer.secret_values import masked
from rljob_trainer.telemetry.colours import CLASSES, stage_class
from rljob_trainer.telemetry.figures import duration, number, percent, readable
from rljob_trainer.telemetry.textplot import braille, spark
from rljob_trainer.telemetry.view import JobSummary, Pace, Present, ShownStep, validation_score

_ACCENT = "cyan"
_MOST_STAGES = 6
_WIDE = 76  # from this many columns on, curve and figures stand side by side
_PLOT_HEIGHT = 7


@dataclass(frozen=True, slots=True)
class _Figure:
    """A row of the table of figures."""

    label: str
    read: Callable[[Mapping[str, float]], float | None]
    show: Callable[[float | None], str] = number


def _metric(*names: str) -> Callable[[Mapping[str, float]], float | None]:
    """Reads the first of ``names`` that the step has."""
    return lambda metrics: next((metrics[name] for name in names if name in metrics), None)


_FIGURES = (
    _Figure("validation", validation_score),
    _Figure("response length", _metric("response/length/mean")),
    _Figure("truncated", _metric("response/length/clip_ratio"), percent),
    _Figure("entropy", _metric("actor/entropy")),
    _Figure("KL to reference", _metric("kl/reference", "kl/in_loss")),
    _Figure("clip fraction", _metric("actor/clip_fraction"), percent),
    _Figure("gradient norm", _metric("actor/grad_norm")),
    _Figure("explained variance", _metric("critic/explained_variance")),
    _Figure("oldest age", _metric("age/max")),
    _Figure("tokens/s", _metric("throughput/tokens_per_second")),
)


class LiveView:
    """Shows a run on ``console``. See ``view.View`` for the calls."""

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console()
        self._clock = clock
        self._job = JobSummary(name="", algorithm="", model="")
        self._pace = Pace(None, clock=clock)
        self._step = 0
        self._rewards: list[float] = []
        self._histories: dict[str, list[float]] = {figure.label: [] for figure in _FIGURES}
        self._now = Present("")
        self._live: Live | None = None
        self._painter = _Painter(self._paint, interval=0.5)
        self._signals = _RestoreOnSignal(self.close)

    def start(self, job: JobSummary) -> None:
        self._job = job
        self._step = job.first_step - 1
        self._pace = Pace(job.total_steps, job.first_step, self._clock)
        self._live = Live(self.picture(), console=self._console, auto_refresh=False, vertical_overflow="crop")
        atexit.register(self.close)
        self._signals.arm()
        self._live.start(refresh=True)
        self._painter.start()

    def step(self, record: ShownStep) -> None:
        self._pace.step(record.step, record.metrics.get("timing/step_seconds"))
        self._step = record.step
        self._rewards.append(record.metrics.get("reward/mean", math.nan))
        for figure in _FIGURES:
            value = figure.read(record.metrics)
            if value is not None:
                self._histories[figure.label].append(value)
        self._painter.changed()

    def message(self, text: str) -> None:
        line = Text(time.strftime("%H:%M:%S "), style="dim").append(masked(text), style="not dim")
        self._console.print(line)

    def show(self, now: Present) -> None:
        self._now = now
        self._painter.changed()

    def close(self) -> None:
        self._painter.stop()
        live, self._live = self._live, None
        if live is not None:
            self._now = Present("", shares=self._now.shares)
            live.update(self.picture())
            live.stop()
        self._signals.disarm()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _paint(self) -> None:
        if self._live is not None:
            self._live.update(self.picture(), refresh=True)

    def picture(self) -> RenderableType:
        """What the terminal should show now, for its present width."""
        width = self._console.width
        parts: list[RenderableType] = [Text(), self._title(), self._progress(width)]
        if width >= _WIDE:
            table = Table.grid(padding=(0, 3), expand=False)
            sparks = min(40, width // 8)
            table.add_row(self._curve(width - sparks - 34, _PLOT_HEIGHT), self._figures(sparks))
            parts.append(table)
        else:
            height = max(3, min(_PLOT_HEIGHT, self._console.height - 20))
            parts += [self._curve(width, height), self._figures(min(40, width - 31))]
        parts += self._where_time_goes(width)
        parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in (self._now.doing, *self._now.engines)]
        return Group(*parts)

    def _title(self) -> Text:
        job = self._job
        facts = [job.algorithm, job.model, job.mode, job.note, job.output]
        title = Text(job.name, style="bold", no_wrap=True, overflow="ellipsis")
        return title.append("  " + " · ".join(fact for fact in facts if fact), style="not bold dim")

    def _progress(self, width: int) -> Text:
        total, remaining = self._job.total_steps, self._pace.remaining
        times = f"  {duration(self._pace.elapsed)}"
        if remaining is not None:
            times += f", {duration(remaining)} left"
        count = f"step {self._step:,}" + (f" of {total:,} " if total else "")
        line = Text(count, no_wrap=True, overflow="crop")
        if total:
            length = max(0, width - len(count) - len(times))
            done = min(length, round(length * self._step / total))
            line.append("━" * done, style=_ACCENT).append("━" * (length - done), style="dim")
        return line.append(times, style="dim")

    def _curve(self, width: int, height: int) -> RenderableType:
        known = [value for value in self._rewards if math.isfinite(value)]
        title = Text("reward ", style="dim").append(number(known[-1] if known else None), style="bold green not dim")
        if not known:
            return Group(Text(), title, *[Text() for _ in range(height)])
        lowest, highest = number(min(known)), number(max(known))
        margin = max(len(lowest), len(highest))
        rows = braille(self._rewards, max(8, width - margin - 1), height)
        labels = [highest, *[""] * (height - 2), lowest]
        lines = [
            Text(f"{label:>{margin}} ", style="dim", no_wrap=True).append(row, style=f"not dim {_ACCENT}")
            for label, row in zip(labels, rows, strict=True)
        ]
        return Group(Text(), title, *lines)

    def _figures(self, spark_width: int) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True, min_width=7)
        table.add_column(style=_ACCENT, no_wrap=True)
        for figure in _FIGURES:
            history = self._histories[figure.label]
            if history:
                shown = figure.show(history[-1])
                table.add_row(figure.label, shown, spark(history, spark_width) if spark_width >= 8 else "")
        return Group(Text(), table)

    def _where_time_goes(self, width: int) -> Iterator[Text]:
        if not self._now.shares:
            return
        yield Text()
        shares = [*self._now.shares.items()][:_MOST_STAGES]
        label = "time "
        bar = Text(label, style="dim", no_wrap=True, overflow="crop")
        legend = Text(" " * len(label), no_wrap=True, overflow="ellipsis")
        for stage, share in shares:
            colour = CLASSES[stage_class(stage)].light
            bar.append("█" * round((width - len(label)) * share), style=f"not dim {colour}")
            legend.append("■ ", style=colour).append(f"{readable(stage)} {percent(share)}   ", style="dim")
        yield bar
        yield legend


class _Painter:
    """A thread that calls ``paint`` after changes, at most once per ``interval``."""

    def __init__(self, paint: Callable[[], None], *, interval: float) -> None:
        self._paint = paint
        self._interval = interval
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="live-view", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        self._changed.set()

    def stop(self) -> None:
        self._stopped.set()
        self._changed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._changed.wait()
            self._changed.clear()
            if not self._stopped.is_set():
                self._paint()
                self._stopped.wait(self._interval)


class _RestoreOnSignal:
    """Calls ``restore`` before a signal ends the process, for signals that nobody else handles."""

    _SIGNALS = (signal.SIGTERM, signal.SIGHUP)

    def __init__(self, restore: Callable[[], None]) -> None:
        self._restore = restore

    def arm(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number_ in self._SIGNALS:
                if signal.getsignal(number_) is signal.SIG_DFL:
                    signal.signal(number_, self._handle)

    def disarm(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number_ in self._SIGNALS:
                if signal.getsignal(number_) == self._handle:  # the driver may have set its own meanwhile
                    signal.signal(number_, signal.SIG_DFL)

    def _handle(self, number_: int, frame: FrameType | None) -> None:
        self._restore()
        signal.signal(number_, signal.SIG_DFL)
        os.kill(os.getpid(), number_)
