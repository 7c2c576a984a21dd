"""Which samples are trained on, and how their rewards are shaped before advantages see them.

Pure decisions on vectors `[S]`. Groups without signal are left out by the pipeline, which refills the batch, and long
responses are charged where they are scored. Random choices take an explicit generator, whose state belongs in the
checkpoint.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rljob_trainer.algorithms.segments import Segments


def without_truncated(mask: Tensor, segments: Segments, truncated: Tensor) -> Tensor:
    """``[tokens]`` bool: the mask without the tokens of truncated sequences (overlong filtering); ``truncated [S]``."""
    return mask & ~segments.spread(truncated)


def clipped_scores(scores: Tensor, low: float, high: float) -> Tensor:
    """``[S]``: scores kept within [low, high]."""
    if low > high:
        raise ValueError(f"the bounds of a reward clip must be low <= high, but are {low} and {high}")
    return scores.clamp(low, high)


def normalised_scores(scores: Tensor, epsilon: float = 1e-8) -> Tensor:
    """``[S]``: (s - mean) / sqrt(variance + epsilon) over the batch, variance unbiased.

    Exactly 0 if all scores are equal (or there is one sample): rounding noise over the root of epsilon would be a
    reward.
    """
    if not scores.numel():
        return scores
    shifted = scores.double() - scores.min()
    centred = shifted - shifted.mean()
    variance = centred.square().sum() / max(scores.numel() - 1, 1)
    return (centred / (variance + epsilon).sqrt()).to(scores.dtype)


def resampled(
    scores: Tensor,
    generator: torch.Generator,
    *,
    kind: Literal["pow", "maxMin", "maxRandom"] = "pow",
    power: float = 2.0,
) -> Tensor:
    """``[S]`` int64: samples drawn with replacement, those with telling rewards more often (PF-PPO, arXiv 2409.06957).

    Weights: pow |score|^power; maxMin 1 for the batch's highest and lowest scores and 0 for the rest; maxRandom
    0.4 for the highest and 0.1 for the rest. If all weights are 0 each sample is drawn alike.
    """
    weights = resampling_weights(scores, kind, power)
    return torch.multinomial(weights.to(generator.device), scores.numel(), replacement=True, generator=generator)


def resampling_weights(scores: Tensor, kind: str, power: float = 2.0) -> Tensor:
    """``[S]`` float64: how often `resampled` draws each sample, in proportion."""
    if kind == "pow":
        # Relative to the largest, which changes no share: a power of the scores themselves may be too large for a
        # number, or too small for any.
        size = scores.double().abs()
        weights = (size / size.max().clamp(min=torch.finfo(size.dtype).tiny)) ** power
    elif kind == "maxMin":
        weights = ((scores == scores.max()) | (scores == scores.min())).double()
    elif kind == "maxRandom":
        weights = torch.where(scores == scores.max(), 0.4, 0.1).double()
    else:
        raise ValueError(f"there is no resampling {kind!r}; use one of: pow, maxMin, maxRandom")
    return weights if bool((weights > 0).any()) else torch.ones_like(weights)
