"""Slopes of an oracle by finite differences, to hold gradients against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from ragged import Rows, near

STEP = 1e-5


def finite_differences(rows: Rows, total: Callable[[Rows], float]) -> list[float | None]:
    """Central differences of ``total`` for each number; None next to a kink, where the two sides disagree."""
    result: list[float | None] = []
    here = total(rows)
    for row in rows:
        for t, value in enumerate(row):
            row[t] = value + STEP
            above = total(rows)
            row[t] = value - STEP
            below = total(rows)
            row[t] = value
            right, left = (above - here) / STEP, (here - below) / STEP
            smooth = abs(right - left) < 1e-3 * max(1.0, abs(right))
            result.append((above - below) / (2 * STEP) if smooth else None)
    return result


def same_slopes(name: str, gradient: torch.Tensor, expected: list[float | None]) -> None:
    """The float64 gradient ``[n]`` is what the differences say, away from kinks."""
    pairs = [(g, e) for g, e in zip(gradient.tolist(), expected, strict=True) if e is not None]
    near(name, torch.tensor([g for g, _ in pairs], dtype=torch.float64), [e for _, e in pairs])
