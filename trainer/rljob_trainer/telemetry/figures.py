"""Numbers as people read them: short, aligned and the same in the terminal, the report and the benchmarks."""

from __future__ import annotations

import math

MISSING = "–"


def number(value: float | None, digits: int = 3) -> str:
    """``value`` with about ``digits`` significant digits: 0.0123, 1.50, 412, 12.3k, 4.1M, 1e-06. Not finite: –, ∞."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent):+d}".replace("+", "")
    # Up to 9,999 as it is; the limits are where rounding would reach the next unit.
    for limit, divisor, unit in (
        (0.9995e12, 1e12, "T"),
        (0.9995e9, 1e9, "G"),
        (0.9995e6, 1e6, "M"),
        (9999.5, 1e3, "k"),
    ):
        if size >= limit:
            return f"{_significant(value / divisor, digits)}{unit}"
    return _significant(value, digits)


def _significant(value: float, digits: int) -> str:
    magnitude = math.floor(math.log10(abs(value)))
    decimals = max(0, digits - 1 - max(magnitude, -1))
    text = f"{value:.{decimals}f}"
    return text if decimals else f"{round(value):,}"


def readable(stage: str) -> str:
    """The name of a stage in words."""
    return stage.replace("_", " ").replace("log probs", "log-probs")


def percent(share: float | None) -> str:
    """A share of one as a percentage: 4.2 %, 37 %, 100 %."""
    if share is None or not math.isfinite(share):
        return MISSING
    hundredths = share * 100
    return f"{hundredths:.1f} %" if 0 < abs(hundredths) < 9.95 else f"{hundredths:.0f} %"


def duration(seconds: float | None) -> str:
    """Seconds as 240 ms, 3.2 s, 41 s, 2 min 05 s, 3 h 07 min, 2 d 04 h."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for size, unit, smaller, below in ((86400, "d", "h", 3600), (3600, "h", "min", 60), (60, "min", "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // below:02d} {smaller}"
    raise AssertionError("unreachable: a minute or more has a unit")


def clock(seconds: float | None) -> str:
    """Seconds in at most six characters for columns: 3s, 2m05s, 3h07m, 2d04h."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    if whole < 100 * 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    return f"{whole // 86400}d"
