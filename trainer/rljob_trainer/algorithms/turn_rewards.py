"""Rewards that were earned before a sequence's end, at the turns of an episode that earned them."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.segments import Segments, kept_only


def earned_at_turns(rewards: Tensor, earned: Tensor, mask: Tensor, segments: Segments) -> Tensor:
    """Token rewards ``[tokens]`` with a part of each sequence's last one moved to where it was earned.

    ``rewards [tokens]`` have each sequence's whole score at its last masked token; ``earned [tokens]`` is how much of
    it was earned at which token before. A sequence's sum stays what it was. What was earned at a token that is not
    masked, and so is not trained, stays at the end.
    """
    earned = kept_only(earned.to(rewards.dtype), mask)
    whole = segments.sum(earned, mask, torch.float64).to(rewards.dtype)
    return rewards + earned - torch.where(segments.is_last(mask), segments.spread(whole), 0)
