"""Figures as SVG text: curves, marks and bars over axes. What is drawn, and why, is the business of `figures.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

COLOURS = ["#1b6ca8", "#d1495b", "#2e933c", "#8e5ea2", "#e8871e", "#555555", "#17a2a2", "#b8a000"]
MARKS = ["#bbbbbb", "#2e933c"]
WIDTH, HEIGHT, MARGIN, LEGEND = 360, 250, 46, 24
LEFT, RIGHT = 62, 30
LETTER = 6.2  # the width of one in the legend, generously
ROW, LABELS, BAR = 17, 160, 300  # of bars


@dataclass(frozen=True)
class Panel:
    """One set of axes. Curves have common abscissae; where they are NaN nothing is drawn."""

    title: str
    across: str
    up: str
    x: Tensor
    curves: Mapping[str, Tensor]
    low: float
    high: float
    dots: bool = False
    """Only the points mean something: each gets a dot."""
    decades: bool = False
    """The ordinates, ``low`` and ``high`` are logarithms to the base 10."""
    intervals: int = 4
    """Of the vertical axis."""
    marks: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Single points (x, y) by name, the first in grey, the second in green."""

    @property
    def legend(self) -> dict[str, str]:
        """Colour by name."""
        return dict(zip(self.curves, COLOURS, strict=False)) | dict(zip(self.marks, MARKS, strict=False))


def panel_svg(panel: Panel, left: int) -> str:
    """The panel as SVG elements, its left edge at ``left``."""
    x0, x1 = float(panel.x[0]), float(panel.x[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - MARGIN - (y - panel.low) / (panel.high - panel.low) * (HEIGHT - 2 * MARGIN)

    (ax, ay), (bx, by) = at(x0, panel.low), at(x1, panel.high)
    middle = (ax + bx) / 2
    parts = [
        f'<rect x="{ax:.1f}" y="{by:.1f}" width="{bx - ax:.1f}" height="{ay - by:.1f}" fill="none" stroke="#999"/>',
        f'<text x="{middle:.1f}" y="{by - 10:.1f}" text-anchor="middle" font-weight="bold">{panel.title}</text>',
        f'<text x="{middle:.1f}" y="{ay + 32:.1f}" text-anchor="middle">{panel.across}</text>',
        f'<text transform="translate({ax - 46:.1f},{(ay + by) / 2:.1f}) rotate(-90)" text-anchor="middle">'
        f"{panel.up}</text>",
    ]
    for k in range(5):
        x = x0 + (x1 - x0) * k / 4
        px, _ = at(x, panel.low)
        parts.append(f'<text x="{px:.1f}" y="{ay + 14:.1f}" text-anchor="middle" fill="#666">{round(x, 3):g}</text>')
    for k in range(panel.intervals + 1):
        y = panel.low + (panel.high - panel.low) * k / panel.intervals
        _, py = at(x0, y)
        label = f"{10**y if panel.decades else y:g}"
        parts.append(f'<text x="{ax - 5:.1f}" y="{py + 3:.1f}" text-anchor="end" fill="#666">{label}</text>')
        parts.append(f'<line x1="{ax:.1f}" y1="{py:.1f}" x2="{bx:.1f}" y2="{py:.1f}" stroke="#eee"/>')
    for colour, (xs, ys) in zip(MARKS, panel.marks.values(), strict=False):
        parts += dots([at(float(x), float(y)) for x, y in zip(xs, ys, strict=True)], colour, 2.2)
    for colour, values in zip(COLOURS, panel.curves.values(), strict=False):
        inside = values.clamp(panel.low, panel.high)
        points = [at(float(x), float(y)) for x, y in zip(panel.x, inside, strict=True)]
        for first, end, state in runs(["gap" if math.isnan(y) else "line" for _, y in points]):
            if state == "line":
                line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points[first:end])
                parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
                parts += dots(points[first:end], colour, 3.0) if panel.dots else []
    return "\n".join(parts)


def dots(points: Iterable[tuple[float, float]], colour: str, radius: float) -> list[str]:
    return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>' for x, y in points]


def legend_rows(entries: Mapping[str, str], width: float) -> int:
    """1, or 2 if the names would run into one another."""
    return 1 if max(map(len, entries)) * LETTER + 37 <= width / len(entries) else 2


def legend_svg(entries: Mapping[str, str], left: float, width: float, top: int) -> list[str]:
    columns = -(-len(entries) // legend_rows(entries, width))
    parts = []
    for i, (name, colour) in enumerate(entries.items()):
        x, y = left + width / columns * (i % columns) + 14, top + LEGEND * (i // columns)
        parts.append(f'<line x1="{x:.0f}" y1="{y}" x2="{x + 18:.0f}" y2="{y}" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 23:.0f}" y="{y + 4}">{name}</text>')
    return parts


def panels(*given: Panel) -> str:
    """Panels side by side: over one legend if it is the same for all, else each over its own."""
    total = WIDTH * len(given)
    if all(panel.legend == given[0].legend for panel in given):
        legends = [(given[0].legend, 0, total)]
    else:
        legends = [(panel.legend, WIDTH * i, WIDTH) for i, panel in enumerate(given)]
    rows = max(legend_rows(entries, width) for entries, _, width in legends)
    parts = [panel_svg(panel, WIDTH * i) for i, panel in enumerate(given)]
    for entries, left, width in legends:
        parts += legend_svg(entries, left, width, HEIGHT + 8)
    return document(total, HEIGHT + LEGEND * rows, parts)


def document(width: int, height: int, parts: Iterable[str]) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def bars(
    titles: Sequence[str],
    across: str,
    edges: Sequence[float],
    rows: Mapping[str, Sequence[Sequence[str]]],
    colours: Mapping[str, str],
    ticks: Mapping[str, float],
) -> str:
    """A row of bars for each name, one column for each title.

    ``edges [n + 1]`` cut the axis into cells; ``rows[name][column] [n]`` names the state of each, which has its colour
    in ``colours`` or, not being there, is left white. ``ticks`` are places on the axis by their label.
    """
    top, bottom = 34, 34 + ROW * len(rows)
    width = LABELS + len(titles) * (BAR + 20)

    def place(column: int, value: float) -> float:
        return LABELS + column * (BAR + 20) + (value - edges[0]) / (edges[-1] - edges[0]) * BAR

    parts = []
    for i, (name, columns) in enumerate(rows.items()):
        y = top + ROW * i
        parts.append(f'<text x="{LABELS - 8}" y="{y + 12}" text-anchor="end">{name}</text>')
        for column, states in enumerate(columns):
            for first, end, state in runs(states):
                if state in colours:
                    x0, x1 = place(column, edges[first]), place(column, edges[end])
                    parts.append(
                        f'<rect x="{x0:.1f}" y="{y + 3}" width="{x1 - x0:.1f}" height="{ROW - 5}" '
                        f'fill="{colours[state]}"/>'
                    )
    for column, title in enumerate(titles):
        x0, x1 = place(column, edges[0]), place(column, edges[-1])
        middle = (x0 + x1) / 2
        parts.append(f'<text x="{middle:.1f}" y="20" text-anchor="middle" font-weight="bold">{title}</text>')
        parts.append(
            f'<rect x="{x0:.1f}" y="{top}" width="{x1 - x0:.1f}" height="{bottom - top}" fill="none" stroke="#999"/>'
        )
        for label, value in ticks.items():
            x = place(column, value)
            parts.append(
                f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#666" stroke-dasharray="1 4"/>'
            )
            parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle" fill="#666">{label}</text>')
        parts.append(f'<text x="{middle:.1f}" y="{bottom + 32}" text-anchor="middle">{across}</text>')
    legends = legend_rows(colours, width)
    parts += legend_svg(colours, 0, width, bottom + 54)
    return document(width, bottom + 46 + LEGEND * legends, parts)


def runs(states: Sequence[str]) -> Iterable[tuple[int, int, str]]:
    """Neighbours of one state: the first of them, the one behind the last, and the state."""
    first = 0
    for i in range(1, len(states) + 1):
        if i == len(states) or states[i] != states[first]:
            yield first, i, states[first]
            first = i
