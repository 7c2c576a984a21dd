"""Charts as SVG text, by hand: curves with axes, legend and smoothing, stacked areas, and bars. No library, no script.

    chart = line_chart([Series("reward", steps, rewards, smoothing=10)], Axes(y_label="reward"), standalone=True)
    Path("reward.svg").write_text(chart)

Colours are classes (``colours.py``) that the surrounding page styles; ``standalone=True`` brings a style along that
follows the reader's light or dark theme. Everything that is text is escaped. The numbers behind are in ``scales.py``.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rljob_trainer.telemetry.colours import CURVES, theme
from rljob_trainer.telemetry.scales import nice_ticks, smooth, thin, tick_label, value_range

_MOST_POINTS = 400
_MOST_STACKED_POINTS = 150
_LETTER = 6.7  # mean width of a letter of 12 px in a system font; generous

RULES = """
svg.chart text { font: 12px system-ui, sans-serif; font-variant-numeric: tabular-nums; fill: var(--soft); }
svg.chart .title { font-size: 14px; font-weight: 600; fill: var(--ink); }
svg.chart .grid { stroke: var(--line); stroke-width: 1; }
svg.chart .curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg.chart .raw { fill: none; stroke-width: 1; opacity: .35; }
svg.chart .dashed { stroke-dasharray: 5 4; }
svg.chart .stroke { stroke: var(--c); }
svg.chart .fill { fill: var(--c); }
"""
"""How a chart looks, given the colours: for the page around it."""


@dataclass(frozen=True, slots=True)
class Series:
    """A curve. ``y`` may hold None or NaN: a gap. ``smoothing`` is the span of a centred mean in points, drawn
    over the raw curve; 0 draws the raw curve alone. ``colour`` is a class of ``colours.py``; default: by position."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    smoothing: int = 0
    markers: bool = False
    dashed: bool = False
    colour: str = ""


@dataclass(frozen=True, slots=True)
class Axes:
    """What the axes say and show. ``from_zero`` includes zero; ``percent`` labels shares of one as percentages."""

    x_label: str = "step"
    y_label: str = ""
    from_zero: bool = False
    percent: bool = False


def line_chart(
    series: Sequence[Series],
    axes: Axes = Axes(),
    *,
    title: str = "",
    width: int = 460,
    height: int = 215,
    standalone: bool = False,
) -> str:
    """An ``<svg>`` element with the curves of ``series``. Without any point it says "no data"."""
    drawn = _prepared(series, _MOST_POINTS)
    values = [value for entry in drawn for value in entry.y if value is not None]
    chart = _Chart(drawn, axes, title, width, height, value_range(values, from_zero=axes.from_zero))
    return chart.document([line for entry in drawn for line in chart.curve(entry)], standalone)


def stacked_chart(
    layers: Sequence[Series],
    axes: Axes = Axes(),
    *,
    title: str = "",
    width: int = 460,
    height: int = 215,
    standalone: bool = False,
) -> str:
    """An ``<svg>`` element in which the layers stand on one another. All share one x; values are never negative."""
    drawn = _prepared(layers, _MOST_STACKED_POINTS)
    tops: list[list[float]] = [[0.0] * len(entry.x) for entry in drawn[:1]]
    for entry in drawn:
        tops.append([below + (value or 0.0) for below, value in zip(tops[-1], entry.y, strict=True)])
    highest = value_range(tops[-1] if tops else [], from_zero=True)
    chart = _Chart(drawn, axes, title, width, height, highest)
    areas = [chart.area(entry, tops[i], tops[i + 1]) for i, entry in enumerate(drawn)]
    return chart.document(areas, standalone)


def bar_chart(
    series: Sequence[Series],
    axes: Axes = Axes(),
    *,
    title: str = "",
    width: int = 460,
    height: int = 215,
    standalone: bool = False,
) -> str:
    """An ``<svg>`` element with a bar for each value, those of one x side by side. All x are whole, no value is
    negative."""
    drawn = _prepared(series, _MOST_POINTS)
    values = [value for entry in drawn for value in entry.y if value is not None]
    chart = _Chart(drawn, axes, title, width, height, (0.0, 1.04 * max(values, default=0.0) or 1.0), beside=0.5)
    return chart.document(
        [bar for place, entry in enumerate(drawn) for bar in chart.bars(entry, place, len(drawn))], standalone
    )


def _prepared(series: Sequence[Series], most: int) -> list[Series]:
    """The series thinned to what can be seen, each with its colour."""
    prepared = []
    for index, entry in enumerate(series):
        x, y = thin(entry.x, entry.y, most)
        span = round(entry.smoothing * len(x) / len(entry.x)) if len(entry.x) else 0
        colour = entry.colour or f"s{index % len(CURVES)}"
        prepared.append(replace(entry, x=x, y=y, smoothing=span, colour=colour))
    return prepared


class _Chart:
    """One chart under construction: where the plot lies, and how data become coordinates."""

    def __init__(
        self,
        series: Sequence[Series],
        axes: Axes,
        title: str,
        width: int,
        height: int,
        y_range: tuple[float, float],
        beside: float = 0.0,
    ) -> None:
        """``beside``: room that is left on both sides of the data."""
        self._series, self._axes, self._title = series, axes, title
        self._width, self._height = width, height
        names = [(entry.name, entry.colour) for entry in series] if len(series) > 1 else []
        self._legend, rows = legend(names, width, top=20.0 + (22 if title else 0))
        self._low, self._high = y_range
        ticks = nice_ticks(*y_range)
        self._y_step = ticks[1] - ticks[0]
        self._y_ticks = [tick for tick in ticks if self._low <= tick <= self._high]
        xs = [x for entry in series for x in entry.x] or [0.0, 1.0]
        room = 0.5 if min(xs) == max(xs) else beside
        self._x_low, self._x_high = min(xs) - room, max(xs) + room
        self._whole = all(x == int(x) for x in xs)
        widest = max(len(self._y_label(tick)) for tick in self._y_ticks)
        self._left = 14 + _LETTER * widest
        self._top = 12 + (22 if title else 0) + 18 * rows + (20 if axes.y_label else 0)
        self._right, self._bottom = width - 14.0, height - 38.0

    def x(self, value: float) -> float:
        return self._left + (self._right - self._left) * (value - self._x_low) / (self._x_high - self._x_low)

    def y(self, value: float) -> float:
        """The place of ``value``; outliers beyond the range run along its edge."""
        inside = min(max(value, self._low), self._high)
        return self._bottom - (self._bottom - self._top) * (inside - self._low) / (self._high - self._low)

    def _y_label(self, tick: float) -> str:
        return tick_label(tick, self._y_step, percent=self._axes.percent)

    def curve(self, series: Series) -> Iterator[str]:
        """The elements of one curve: the raw one faintly, the smoothed one over it, markers where asked for."""
        y = series.y
        if series.smoothing > 1:
            yield f'<path class="raw stroke {series.colour}" d="{self._path(series.x, y)}"/>'
            # An outlier beyond the range must not drag the mean along with it.
            y = smooth([v if v is None else min(max(v, self._low), self._high) for v in y], series.smoothing)
        dashed = " dashed" if series.dashed else ""
        yield f'<path class="curve stroke {series.colour}{dashed}" d="{self._path(series.x, y)}"/>'
        points = [(px, py) for px, py in zip(series.x, y, strict=True) if py is not None]
        if series.markers or len(points) == 1:
            for px, py in points:
                yield f'<circle class="fill {series.colour}" cx="{_n(self.x(px))}" cy="{_n(self.y(py))}" r="3"/>'

    def _path(self, x: Sequence[float], y: Sequence[float | None]) -> str:
        pieces, pen_down = [], False
        for px, py in zip(x, y, strict=True):
            if py is not None:
                pieces.append(f"{'L' if pen_down else 'M'}{_n(self.x(px))} {_n(self.y(py))}")
            pen_down = py is not None
        return "".join(pieces)

    def area(self, series: Series, floor: Sequence[float], top: Sequence[float]) -> str:
        """The area between two curves over the x of ``series``."""
        if not series.x:
            return ""
        there = [f"{_n(self.x(px))} {_n(self.y(py))}" for px, py in zip(series.x, top, strict=True)]
        back = [f"{_n(self.x(px))} {_n(self.y(py))}" for px, py in zip(series.x, floor, strict=True)]
        return f'<path class="fill {series.colour}" d="M{"L".join([*there, *reversed(back)])}Z"/>'

    def bars(self, series: Series, place: int, of: int) -> Iterator[str]:
        """The bars of one series, the ``place``-th of so many at each x."""
        share = 0.8 / of
        for px, py in zip(series.x, series.y, strict=True):
            if py:
                left, right = self.x(px - 0.4 + place * share), self.x(px - 0.4 + (place + 1) * share)
                box = f'x="{_n(left)}" y="{_n(self.y(py))}" width="{_n(right - left)}"'
                yield f'<rect class="fill {series.colour}" {box} height="{_n(self._bottom - self.y(py))}"/>'

    def document(self, body: Sequence[str], standalone: bool) -> str:
        """The whole element around what was drawn."""
        label = self._title or ", ".join(entry.name for entry in self._series)
        attributes = f'viewBox="0 0 {self._width} {self._height}" role="img" aria-label="{html.escape(label)}"'
        if standalone:
            attributes += f' xmlns="http://www.w3.org/2000/svg" width="{self._width}" height="{self._height}"'
        parts = [self._style()] if standalone else []
        if self._title:
            parts.append(_text(8, 21, self._title, kind="title"))
        parts += [*self._legend, *self._grid(), *body]
        if not any(entry.x for entry in self._series):
            parts.append(_text(self._width / 2, self._height / 2, "no data", "middle"))
        return f'<svg class="chart" {attributes} data-chart="{html.escape(self._data())}">{"".join(parts)}</svg>'

    def _style(self) -> str:
        colours = theme("svg.chart", (entry.colour for entry in self._series))
        return f"<style>{colours}\nsvg.chart {{ background: var(--card); }}{RULES}</style>"

    def _grid(self) -> Iterator[str]:
        for tick in self._y_ticks:
            y = _n(self.y(tick))
            yield f'<line class="grid" x1="{_n(self._left)}" x2="{_n(self._right)}" y1="{y}" y2="{y}"/>'
            yield _text(self._left - 7, self.y(tick) + 4, self._y_label(tick), "end")
        steps = nice_ticks(self._x_low, self._x_high, count=6, smallest=1.0 if self._whole else 0.0)
        for tick in steps:
            if self._x_low <= tick <= self._x_high:
                label = tick_label(tick, steps[1] - steps[0] if len(steps) > 1 else 1.0)
                yield _text(self.x(tick), self._bottom + 17, label, "middle")
        yield _text((self._left + self._right) / 2, self._height - 4, self._axes.x_label, "middle")
        if self._axes.y_label:
            yield _text(8, self._top - 9, self._axes.y_label)

    def _data(self) -> str:
        """What a page's script needs to show the values under the pointer."""
        plot = (self._left, self._top, self._right - self._left, self._bottom - self._top)
        document = {
            "plot": [round(value, 1) for value in plot],
            "xRange": [self._x_low, self._x_high],
            "xLabel": self._axes.x_label,
            "percent": self._axes.percent,
            "series": [
                {
                    "name": entry.name,
                    "colour": entry.colour,
                    "x": [round(x, 2) for x in entry.x],
                    "y": [None if y is None else float(f"{y:.4g}") for y in entry.y],
                }
                for entry in self._series
            ],
        }
        return json.dumps(document, separators=(",", ":"))


def legend(names: Sequence[tuple[str, str]], width: int, top: float) -> tuple[list[str], int]:
    """The elements of a legend, names with the classes of their colours, in as many rows as ``width`` asks for, and the
    number of rows. They are 18 apart; the first line of text stands on ``top``."""
    parts, row, x = [], 0, 8.0
    for name, colour in names:
        needed = 17 + _LETTER * len(name) + 20
        if x > 8 and x + needed > width:
            row, x = row + 1, 8.0
        y = top + 18 * row
        parts.append(f'<rect class="fill {colour}" x="{_n(x)}" y="{_n(y - 6)}" width="12" height="4" rx="2"/>')
        parts.append(_text(x + 17, y, name))
        x += needed
    return parts, row + 1 if names else 0


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
