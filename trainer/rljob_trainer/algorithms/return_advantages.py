"""Advantages from returns alone: REINFORCE and its relatives, which need neither critic nor (mostly) groups."""

from __future__ import annotations

import torch

from rljob_trainer.algorithms.estimators import AdvantageInputs, AdvantageOutput, advantage_estimator
from rljob_trainer.algorithms.scan import discounted_sum
from rljob_trainer.algorithms.segments import whiten as whitened


@advantage_estimator("reinforce")
def reinforce(inputs: AdvantageInputs, *, gamma: float = 1.0, whiten: bool = False) -> AdvantageOutput:
    """A_t = G_t - b with G_t = r_t + gamma G_next and b the batch's mean sequence reward (Williams 1992)."""
    returns = discounted_sum(inputs.token_rewards, gamma, inputs.segments, inputs.mask)
    advantages = torch.where(inputs.mask, returns - inputs.sequence_rewards.mean().to(returns.dtype), 0)
    return AdvantageOutput(whitened(advantages, inputs.mask) if whiten else advantages)


@advantage_estimator("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float = 1.0, whiten: bool = True) -> AdvantageOutput:
    """G_t = r_t + gamma G_next, whitened over the batch's tokens (arXiv 2501.03262)."""
    returns = discounted_sum(inputs.token_rewards, gamma, inputs.segments, inputs.mask)
    return AdvantageOutput(whitened(returns, inputs.mask) if whiten else returns)


@advantage_estimator("reinforce_plus_plus_baseline", smallest_group=2)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, *, whiten: bool = True) -> AdvantageOutput:
    """r_i - mean of its group, whitened over the batch's tokens (arXiv 2501.03262)."""
    advantages = inputs.spread(inputs.grouping.centred(inputs.sequence_rewards))
    return AdvantageOutput(whitened(advantages, inputs.mask) if whiten else advantages)


@advantage_estimator("remax", needs_greedy=True)
def remax(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_t = sum of the rewards from t on - reward of the prompt's greedy response (arXiv 2310.10505, algorithm 1)."""
    assert inputs.greedy_scores is not None
    returns = discounted_sum(inputs.token_rewards, 1.0, inputs.segments, inputs.mask)
    return AdvantageOutput(torch.where(inputs.mask, returns - inputs.spread(inputs.greedy_scores), 0))
