"""Rewards that were earned before a sequence's end, at the turns of an episode that earned them."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.segments import Segments, kept_only


def earned_at_turns(rewards: Tensor, earned: Tensor, mask: Tensor, segments: Segments) -> Tensor:
    """Token rewards ``[tokens]`` with a part of each sequence's last one moved to where it was earned.

    ``rewards [tokens]`` have each sequence's whole score at its last masked token; ``earned [tokens]`` is how much of
    it was earned at which token before. A sequence's sum stays what it was, to the bit for scores of float32: the
    result is float64, since estimators divide what is left of equal sums by their standard deviation. What was earned
    at a token that is not masked, and so is not trained, stays at the end.
    """
    earned = kept_only(earned.double(), mask)
    whole = segments.sum(earned, mask, torch.float64)
    return rewards.double() + earned - torch.where(segments.is_last(mask), segments.spread(whole), 0)
