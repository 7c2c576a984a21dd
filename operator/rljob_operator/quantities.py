"""Kubernetes quantities (500m, 16Gi) as numbers, as far as the operator must compute with them."""

from __future__ import annotations

import re
from fractions import Fraction

_SUFFIX = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(1000),
}
_SUFFIX |= {letter: Fraction(1000) ** power for power, letter in enumerate("MGTPE", 2)}
_SUFFIX |= {f"{letter}i": Fraction(1024) ** power for power, letter in enumerate("KMGTPE", 1)}
_FORM = re.compile(r"\+?([0-9.]+)([a-zA-Z]*)([eE][+-]?[0-9]+)?")


def parse(text: str) -> Fraction:
    """The exact value of a quantity that the API has already checked."""
    whole = re.fullmatch(r"\+?([0-9.]+)[eE]([+-]?[0-9]+)", text)
    if whole:
        return Fraction(whole[1]) * Fraction(10) ** int(whole[2])
    form = _FORM.fullmatch(text)
    if form is None or form[2] not in _SUFFIX:
        raise ValueError(f"{text!r} is not a Kubernetes quantity")
    return Fraction(form[1]) * _SUFFIX[form[2]]


def share_in_mebibytes(text: str, share: Fraction) -> str:
    """A share of an amount of memory, in whole Mi (at least 1)."""
    return f"{max(1, int(parse(text) * share / 1024**2))}Mi"
