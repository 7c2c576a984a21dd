"""Kubernetes quantities (500m, 16Gi) as exact numbers."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

QUANTITY = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,18})?"
"""Kubernetes reads an exponent as a number of 64 bits, and refuses a larger one."""
_SUFFIX = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(1000),
}
_SUFFIX |= {letter: Fraction(1000) ** power for power, letter in enumerate("MGTPE", 2)}
_SUFFIX |= {f"{letter}i": Fraction(1024) ** power for power, letter in enumerate("KMGTPE", 1)}
_LARGEST_EXPONENT = 30
"""Kubernetes caps what is larger than 2^63; powers beyond that need not be computed."""


def parse(value: Any) -> Fraction:
    """The exact value of a quantity, written as text or as a number. Raises ``ValueError`` if it is none."""
    form = re.fullmatch(QUANTITY, str(value))
    if form is None or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a Kubernetes quantity")
    suffix = form[2] or ""
    number = Fraction(str(value)[: len(str(value)) - len(suffix)])
    if suffix[:1] in ("e", "E") and len(suffix) > 1:
        exponent = max(-_LARGEST_EXPONENT, min(int(suffix[1:]), _LARGEST_EXPONENT))
        return number * Fraction(10) ** exponent
    return number * _SUFFIX[suffix]


def known(value: Any) -> Fraction | None:
    """The value of a quantity; None if it is none."""
    try:
        return parse(value)
    except ValueError:
        return None
