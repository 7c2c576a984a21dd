"""A baseline for each token of a group: what the group's responses still earn from that position on.

The optimal token baseline weighs each response by how much gradient it has gathered so far,
W_t = sum over j <= t of (1 - 2 pi_j + sum over the vocabulary of pi^2), times the squared importance weight if there
is one (arXiv 2602.07078; the bracket is the squared norm of the log-probability's gradient by the logits). W is never
negative, so that a baseline lies between the smallest and the largest return of its group, and 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.estimators import AdvantageInputs, AdvantageOutput, advantage_estimator
from rljob_trainer.algorithms.scan import discounted_sum
from rljob_trainer.algorithms.segments import Segments, kept_only


@advantage_estimator("optimal_token_baseline", smallest_group=2, needs_sum_squared_probs=True)
def optimal_token_baseline(inputs: AdvantageInputs, *, gamma: float = 1.0, epsilon: float = 1e-30) -> AdvantageOutput:
    """A_t = G_t - B_t, B_t = sum_i G_it W_it / (sum_i W_it + epsilon) over the group's responses with a masked token t.

    epsilon is there for a W of exactly 0 only: that of a confident prefix is (1 - pi)^2, 1e-14 where float32 ends, and
    one of that size would take much of the baseline away. Where only one response has such a token B_t is 0: its own
    return as baseline would cancel it.
    """
    return _with_token_baseline(inputs, inputs.segments.positions, gamma, epsilon)


@advantage_estimator("tir_optimal_token_baseline", smallest_group=2, needs_sum_squared_probs=True)
def tir_optimal_token_baseline(
    inputs: AdvantageInputs, *, gamma: float = 1.0, epsilon: float = 1e-30
) -> AdvantageOutput:
    """The optimal token baseline for responses with tool output: tokens are aligned by their number among the tokens
    the model made."""
    return _with_token_baseline(inputs, ranks(inputs.mask, inputs.segments), gamma, epsilon)


def ranks(mask: Tensor, segments: Segments) -> Tensor:
    """``[tokens]`` int64: how many masked tokens of its sequence stand before each token."""
    before = torch.cumsum(mask, 0) - mask.long()
    first = torch.cat([before, before.new_zeros(1)])[segments.offsets[:-1]]
    return before - segments.spread(first)


def token_energy(inputs: AdvantageInputs) -> Tensor:
    """``[tokens]`` float64: 1 - 2 pi + sum of pi^2, the squared norm of the gradient of log pi by the logits.

    The streams are rounded to float32 (or less), and of a confident token the sum leaves nothing but that rounding,
    of either sign. It is (1 - pi)^2 plus the squares of all other tokens' probabilities, which add up to 1 - pi: so it
    lies between (1 - pi)^2 and twice that, whatever rounding says, and 1 - pi is known from log pi to all digits.
    """
    assert inputs.log_probs is not None
    assert inputs.sum_squared_probs is not None
    log_probs = inputs.log_probs.double().clamp(max=0)
    least = torch.expm1(log_probs).square()
    energy = 1.0 - 2.0 * log_probs.exp() + inputs.sum_squared_probs.double()
    energy = torch.minimum(torch.maximum(energy, least), 2.0 * least)
    if inputs.weights is not None:
        energy = energy * inputs.weights.double().square()
    return torch.where(inputs.mask, energy, 0)


def gathered_energy(inputs: AdvantageInputs) -> Tensor:
    """``[tokens]`` float64: W_t, the energy that a response has gathered up to each token; 0 where masked."""
    backwards = Segments.from_lengths(inputs.segments.lengths.flip(0))
    return discounted_sum(token_energy(inputs).flip(0), 1.0, backwards, inputs.mask.flip(0)).flip(0)


def _with_token_baseline(inputs: AdvantageInputs, position: Tensor, gamma: float, epsilon: float) -> AdvantageOutput:
    mask, longest = inputs.mask, max(inputs.segments.longest, 1)
    returns = discounted_sum(inputs.token_rewards, gamma, inputs.segments, mask)
    energy = gathered_energy(inputs)
    cell = inputs.segments.spread(inputs.grouping.index) * longest + position  # one for each group and position

    def gathered(stream: Tensor) -> Tensor:
        return stream.new_zeros(inputs.grouping.count * longest).index_add_(0, cell, stream)[cell]

    baseline = gathered(returns.double() * energy) / (gathered(energy) + epsilon)
    alone = gathered(mask.long()) < 2
    advantages = returns - torch.where(alone, 0, baseline).to(returns.dtype)
    return AdvantageOutput(kept_only(advantages, mask))
