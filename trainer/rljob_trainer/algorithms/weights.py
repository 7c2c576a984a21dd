"""Importance weights pi_old / pi_roll: of a token or of a whole sequence, cut at bounds or zeroed outside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rljob_trainer.algorithms.segments import Segments

LOG_RATIO_BOUND = 20.0
WeightLevel = Literal["token", "sequence"]


@dataclass(frozen=True)
class Weights:
    """How weights are made of ratios.

    level token: exp(l_t), one a token. level sequence: exp(sum of l_t), the same for all its tokens. l is clamped to
    +-20 before exp. Weights above ``high`` are cut to it; with ``low`` given, those outside [low, high] become 0
    (IcePop, arXiv 2510.18855), or with ``clamp`` the nearer bound (slime's --tis-clip-low and --tis-clip).
    ``normalize`` divides by their mean over the batch (tokens or sequences, as the level says).
    """

    level: WeightLevel = "token"
    high: float = 2.0
    low: float | None = None
    normalize: bool = False
    clamp: bool = False

    def __post_init__(self) -> None:
        if self.level not in ("token", "sequence"):
            raise ValueError(f"the level of weights must be token or sequence, not {self.level}")
        if self.high <= 0 or (self.low is not None and not 0 <= self.low < self.high):
            raise ValueError(f"the bounds of weights must be 0 <= low < high, but are {self.low} and {self.high}")


def importance_ratio(log_ratio: Tensor, mask: Tensor, segments: Segments, level: WeightLevel) -> Tensor:
    """``[tokens]`` (level token) or ``[S]`` (level sequence) of exp of the clamped log-ratio."""
    if level == "sequence":
        log_ratio = segments.sum(log_ratio, mask)
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def within_bounds(ratio: Tensor, low: float | None, high: float, *, clamp: bool = False) -> Tensor:
    """min(ratio, high); with ``low`` given, the ratio inside [low, high] and 0 outside, or with ``clamp`` the bound."""
    if low is None or clamp:
        return ratio.clamp(low, high)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0)
