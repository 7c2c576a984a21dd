"""Curves out of characters: a one-line spark and a plot of Braille dots, for the live view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"
_DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a Braille cell


def shrink(values: Sequence[float], width: int) -> list[float]:
    """At most ``width`` values: means of equal stretches, NaN where a stretch has no finite value."""
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [_mean(values[start:end]) for start, end in pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _range(values: Sequence[float]) -> tuple[float, float] | None:
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else None


def spark(values: Sequence[float], width: int) -> str:
    """``values`` as at most ``width`` block characters between their smallest and largest; blanks for NaN."""
    points = shrink(values, width)
    bounds = _range(points)
    if bounds is None:
        return ""
    low, high = bounds
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((p - low) * scale)] if math.isfinite(p) else " " for p in points)


def braille(values: Sequence[float], width: int, height: int) -> list[str]:
    """A curve of ``width`` x ``height`` characters, each 2 x 4 dots, top line first.

    Neighbouring points are joined; fewer points than dots are spread over the whole width. The curve's smallest value
    lies on the bottom line of dots, its largest on the top one; a constant curve lies in the middle.
    """
    columns, rows = 2 * width, 4 * height
    points = shrink(values, columns)
    bounds = _range(points)
    cells = [[0] * width for _ in range(height)]
    if bounds is not None:
        low, high = bounds
        scale = (rows - 1) / (high - low) if high > low else 0.0
        spread = (columns - 1) / (len(points) - 1) if len(points) > 1 else 0.0
        base = 0 if high > low else (rows - 1) // 2
        dots = [
            (round(i * spread), base + round((p - low) * scale)) if math.isfinite(p) else None
            for i, p in enumerate(points)
        ]
        _draw(cells, dots, rows)
    return ["".join(chr(0x2800 + bits) for bits in line) for line in cells]


def _draw(cells: list[list[int]], dots: Sequence[tuple[int, int] | None], rows: int) -> None:
    previous: tuple[int, int] | None = None
    for dot in dots:
        if dot is not None:
            for x, y in _line(previous or dot, dot):
                down = rows - 1 - y
                cells[down // 4][x // 2] |= _DOT_BITS[down % 4][x % 2]
        previous = dot


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * i / steps), round(start[1] + (end[1] - start[1]) * i / steps))
        for i in range(steps + 1)
    ]
