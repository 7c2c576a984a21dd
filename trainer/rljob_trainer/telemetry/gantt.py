"""The end of a run's timeline as one figure: what trainer and engines did side by side, and where they had to wait.

``timeline.json`` holds the whole of it for Perfetto; here are the last steps of the rows that fit on a page.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_trainer.errors import DataError
from rljob_trainer.telemetry.catalogue import STAGES
from rljob_trainer.telemetry.colours import stage_class
from rljob_trainer.telemetry.figures import readable
from rljob_trainer.telemetry.scales import nice_ticks, tick_label
from rljob_trainer.telemetry.svg import legend
from rljob_trainer.telemetry.timing import PUBLICATION, TRAINER, row_of

STEPS = 6
"""So many of the last steps are shown."""
_MOST_ROWS = 12
_ROW, _BAR, _LEFT, _TOP = 26.0, 16.0, 110.0, 16.0
_WHOLE_STEP = "step"
"""The stage around all others: it says how long the figure is, and is not drawn."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that a row did, in seconds since the figure begins."""

    row: str
    name: str
    start: float
    end: float


def last_steps(path: Path, steps: int = STEPS) -> list[Bar]:
    """What happened in the last steps of a ``timeline.json``; without steps the last minute. Raises ``DataError``."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        ends = [event["ts"] + event["dur"] for event in spans]
        begun = sorted(event["ts"] for event in spans if event["name"] == "generate")
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise DataError(f"{path} is not a timeline: {problem!r}") from problem
    if not spans:
        return []
    first = begun[-steps:][0] if begun else max(ends) - 60e6
    return [_bar(event, first) for event in spans if event["ts"] + event["dur"] > first]


def _bar(event: Mapping[str, Any], first: float) -> Bar:
    start, end = event["ts"] - first, event["ts"] + event["dur"] - first
    return Bar(event["cat"], event["name"], max(0.0, start) / 1e6, end / 1e6)


def gantt_chart(bars: Sequence[Bar], *, width: int = 940) -> str:
    """An ``<svg>`` element: a row for each of the rows named in ``bars``, bars coloured by what was done.

    Engines' bars say under which version they sampled, in two colours that take turns. Nested stages lie on top of
    those around them.
    """
    drawn = [bar for bar in bars if bar.name != _WHOLE_STEP]
    rows = _rows(drawn)
    shown = {row: number for number, row in enumerate(rows[:_MOST_ROWS])}
    names = sorted({bar.name for bar in drawn if bar.row in shown}, key=_order)
    parts, lines = legend([*dict.fromkeys(_look(name) for name in names)], width, top=20.0)
    top = _TOP + 18.0 * lines
    length = max((bar.end for bar in drawn), default=1.0)
    height = top + _ROW * len(shown) + 34.0

    def x(seconds: float) -> float:
        return _LEFT + (width - _LEFT - 14.0) * seconds / length

    for row, number in shown.items():
        parts.append(_text(_LEFT - 8, top + _ROW * number + 13, row, "end"))
    for bar in sorted(drawn, key=lambda bar: bar.start - bar.end):
        if bar.row not in shown:
            continue
        left, right = x(bar.start), x(bar.end)
        parts.append(
            f'<rect class="fill {_look(bar.name)[1]}" x="{left:.1f}" y="{top + _ROW * shown[bar.row]:.1f}" '
            f'width="{max(0.5, right - left):.1f}" height="{_BAR:.0f}">'
            f"<title>{html.escape(f'{bar.row}: {bar.name}, {bar.end - bar.start:.3g} s')}</title></rect>"
        )
    bottom = top + _ROW * len(shown)
    ticks = nice_ticks(0.0, length)
    for tick in (tick for tick in ticks if tick <= length):
        parts.append(_text(x(tick), bottom + 14, tick_label(tick, ticks[1] - ticks[0]), "middle"))
    hidden = len(rows) - len(shown)
    note = f"seconds; {hidden} more rows are in timeline.json" if hidden else "seconds"
    parts.append(_text((_LEFT + width) / 2, bottom + 30, note, "middle"))
    label = f"timeline of {', '.join(shown)}"
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{html.escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _rows(bars: Sequence[Bar]) -> list[str]:
    """The trainer, what it does with the learner, publications, then the engines by name."""
    first = [TRAINER, row_of("score"), row_of("update"), PUBLICATION]
    return sorted(
        {bar.row for bar in bars},
        key=lambda row: (
            first.index(row) if row in first else len(first),
            row.startswith("engine "),
            len(row),
            row,
        ),
    )


def _look(name: str) -> tuple[str, str]:
    """What the legend calls a bar of this name, and the class of its colour."""
    version = re.fullmatch(r"version (\d+)", name)
    if version is None:
        return readable(name), stage_class(name)
    odd = int(version[1]) % 2
    return f"sampling, {'odd' if odd else 'even'} version", f"sampling-{odd}"


def _order(name: str) -> tuple[int, str]:
    """Stages as the catalogue has them, then everything else."""
    stages = [*STAGES]
    return stages.index(name) if name in STAGES else len(stages), name


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
