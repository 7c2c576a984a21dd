"""The arithmetic of charts: round ticks, their labels, the range to show, smoothing and thinning. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def known(value: float | None) -> bool:
    """Whether there is something to draw: not None, NaN or infinite."""
    return value is not None and math.isfinite(value)


def nice_ticks(low: float, high: float, count: int = 5, *, smallest: float = 0.0) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover ``low`` to ``high``, about ``count`` of them.

    ``smallest`` bounds their distance from below (1 for whole numbers). Raises ``ValueError`` unless both ends are
    finite and ``low < high``.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"ticks need finite bounds in rising order, not {low} and {high}")
    rough = max((high - low) / max(1, count - 1), smallest)
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(smallest, min((power * m for m in (1, 2, 5, 10)), key=lambda nice: abs(math.log(nice / rough))))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Products of integers and a rounded step: 3 * 0.1 is shown as 0.3, not 0.30000000000000004.
    digits = max(0, -math.floor(math.log10(step))) + 1
    return [round(i * step, digits) for i in range(first, last + 1)]


def tick_label(value: float, step: float, *, percent: bool = False) -> str:
    """``value`` with as many decimals as ticks ``step`` apart need; thousands and millions get a letter."""
    if percent:
        return f"{_fixed(value * 100, step * 100)} %"
    if value == 0:
        return "0"
    size = max(abs(value), step)
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit or step >= divisor:
            return f"{_fixed(value / divisor, step / divisor)}{unit}"
    if step < 1e-4:
        decimals = max(0, math.floor(math.log10(abs(value)) + 1e-9) - math.floor(math.log10(step) + 1e-9))
        mantissa, _, exponent = f"{value:.{decimals}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return _fixed(value, step)


def _fixed(value: float, step: float) -> str:
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{decimals}f}"


def smooth(values: Sequence[float | None], span: int) -> list[float | None]:
    """Mean of each value's neighbours on both sides, their weights falling exponentially over about ``span`` points.

    It looks both ways, so the curve does not lag behind; at the ends only what is there counts. Gaps stay gaps.
    """
    keep = 1.0 - 2.0 / (span + 1) if span > 1 else 0.0
    before = _decayed(values, keep)
    after = _decayed(values[::-1], keep)[::-1]
    return [
        (total_b + total_a - value) / (weight_b + weight_a - 1.0)
        if value is not None and math.isfinite(value)
        else None
        for value, (total_b, weight_b), (total_a, weight_a) in zip(values, before, after, strict=True)
    ]


def _decayed(values: Sequence[float | None], keep: float) -> list[tuple[float, float]]:
    """Running sums of values and of weights, each point having forgotten a share of what came before."""
    total = weight = 0.0
    result = []
    for value in values:
        total, weight = keep * total, keep * weight
        if value is not None and math.isfinite(value):
            total, weight = total + value, weight + 1.0
        result.append((total, weight))
    return result


def thin(x: Sequence[float], y: Sequence[float | None], limit: int) -> tuple[list[float], list[float | None]]:
    """At most ``limit`` points: means over equal stretches of the series; what cannot be drawn becomes None."""
    if len(x) <= limit:
        return list(x), [value if known(value) else None for value in y]
    xs: list[float] = []
    ys: list[float | None] = []
    for start, end in pairwise(round(i * len(x) / limit) for i in range(limit + 1)):
        found = [value for value in y[start:end] if value is not None and math.isfinite(value)]
        xs.append(sum(x[start:end]) / (end - start))
        ys.append(sum(found) / len(found) if found else None)
    return xs, ys


def value_range(values: Sequence[float], *, from_zero: bool = False) -> tuple[float, float]:
    """The range to show, never empty, with a little room: all of it, unless at most 2 % of the values at either end
    stretch it more than tenfold. Where the values end at zero, so does the range."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return 0.0, 1.0
    low, high = ordered[0], ordered[-1]
    tail = len(ordered) // 50
    inner_low, inner_high = ordered[tail], ordered[-1 - tail]
    if inner_high > inner_low and high - low > 10 * (inner_high - inner_low):
        margin = 0.5 * (inner_high - inner_low)
        low, high = max(low, inner_low - margin), min(high, inner_high + margin)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # constant but for rounding
        room = abs(low) * 0.5 or 0.5
        return (low - room, high + room) if low or not from_zero else (0.0, 1.0)
    margin = 0.04 * (high - low)
    return low and low - margin, high and high + margin  # zero stays zero
