"""Which samples are trained on, and how their rewards are shaped before advantages see them.

Pure decisions on vectors `[S]`; refilling a batch after a filter is the pipeline's work. Random choices take an
explicit generator, whose state belongs in the checkpoint.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rljob_trainer.algorithms.groups import Groups
from rljob_trainer.algorithms.segments import Segments


def has_signal(scores: Tensor, groups: Tensor) -> Tensor:
    """``[S]`` bool: True for samples whose group's scores are not all the same (DAPO, arXiv 2503.14476, section 3.2).

    Groups of one carry no signal. ``scores [S]``, ``groups [S]`` integers.
    """
    of = Groups(groups)
    return of.max(scores) > of.min(scores)


def large_enough(groups: Tensor, smallest: int) -> Tensor:
    """``[S]`` bool: True for samples whose group still has ``smallest`` samples after others were dropped."""
    return Groups(groups).sizes >= smallest


def overlong_penalty(lengths: Tensor, *, limit: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """``[S]`` to be added to the scores (arXiv 2503.14476, section 3.4: soft overlong punishment).

    0 up to ``limit - buffer`` tokens, then linear down to -penalty at ``limit``, and -penalty beyond.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"the buffer must be between 1 and the limit of {limit} tokens, but is {buffer}")
    excess = (lengths - (limit - buffer)).clamp(min=0, max=buffer)
    return -penalty * excess / buffer


def without_truncated(mask: Tensor, segments: Segments, truncated: Tensor) -> Tensor:
    """``[tokens]`` bool: the mask without the tokens of truncated sequences (overlong filtering); ``truncated [S]``."""
    return mask & ~segments.spread(truncated)


def clipped_scores(scores: Tensor, low: float, high: float) -> Tensor:
    """``[S]``: scores kept within [low, high]."""
    if low > high:
        raise ValueError(f"the bounds of a reward clip must be low <= high, but are {low} and {high}")
    return scores.clamp(low, high)


def normalised_scores(scores: Tensor, epsilon: float = 1e-8) -> Tensor:
    """``[S]``: (s - mean) / sqrt(variance + epsilon) over the batch, variance unbiased; 0 if there is one sample."""
    centred = scores - scores.mean() if scores.numel() else scores
    variance = centred.square().sum() / max(scores.numel() - 1, 1)
    return centred / (variance + epsilon).sqrt()


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
        weights = scores.double().abs() ** power
    elif kind == "maxMin":
        weights = ((scores == scores.max()) | (scores == scores.min())).double()
    elif kind == "maxRandom":
        weights = torch.where(scores == scores.max(), 0.4, 0.1).double()
    else:
        raise ValueError(f"there is no resampling {kind!r}; choose one of: pow, maxMin, maxRandom")
    return weights if bool((weights > 0).any()) else torch.ones_like(weights)
