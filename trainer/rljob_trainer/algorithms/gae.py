"""Generalised advantage estimation: the estimator with a critic."""

from __future__ import annotations

import torch

from rljob_trainer.algorithms.estimators import AdvantageInputs, AdvantageOutput, advantage_estimator
from rljob_trainer.algorithms.scan import discounted_sum
from rljob_trainer.algorithms.segments import whiten as whitened


@advantage_estimator("gae", needs_critic=True)
def gae(inputs: AdvantageInputs, *, gamma: float = 1.0, lambda_: float = 1.0, whiten: bool = True) -> AdvantageOutput:
    """A_t = delta_t + gamma lambda A_next, delta_t = r_t + gamma V_next - V_t (arXiv 1506.02438).

    `next` is the next masked token: V and A pass over tool output unchanged. After the last one stands 0 or, for
    truncated responses with ``final_values``, that value. Returns are A + V before whitening.

    Computed as the recurrence of the returns, G_t = r_t + gamma ((1 - lambda) V_next + lambda G_next) and A = G - V,
    which is the same and, unlike a sum of thousands of delta, does not lose digits when lambda is 1.
    """
    mask, segments = inputs.mask, inputs.segments
    assert inputs.values is not None
    values = torch.where(mask, inputs.values, 0)
    inflow = inputs.token_rewards.to(values.dtype)

    if lambda_ < 1.0:
        inflow = inflow + (gamma * (1.0 - lambda_)) * _next_value(inputs, values)
    if inputs.final_values is not None and inputs.truncated is not None:
        beyond = torch.where(inputs.truncated, inputs.final_values, 0).to(values.dtype)
        inflow = inflow + torch.where(segments.is_last(mask), gamma * segments.spread(beyond), 0)
    returns = discounted_sum(inflow, gamma * lambda_, segments, mask)
    advantages = returns - values
    return AdvantageOutput(whitened(advantages, mask) if whiten else advantages, returns)


def _next_value(inputs: AdvantageInputs, values: torch.Tensor) -> torch.Tensor:
    """``[tokens]``: V of the next masked token of the same sequence; 0 after the last one."""
    mask, tokens = inputs.mask, inputs.segments.tokens
    rank = torch.cumsum(mask, 0) - 1
    compact = values.new_zeros(tokens + 2)
    compact[torch.where(mask, rank, tokens + 1)] = values  # what is masked is 0 and goes to the spare element
    follows = compact[rank.clamp(min=0) + 1]
    return torch.where(mask & ~inputs.segments.is_last(mask), follows, 0)
