"""Generalised advantage estimation: the estimator with a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.estimators import (
    AdvantageInputs,
    AdvantageOutput,
    advantage_estimator,
    refuse_non_finite,
)
from rljob_trainer.algorithms.kept import Kept
from rljob_trainer.algorithms.scan import sums_to_the_end
from rljob_trainer.algorithms.segments import Segments
from rljob_trainer.algorithms.segments import whiten as whitened


@advantage_estimator("gae", needs_critic=True)
def gae(inputs: AdvantageInputs, *, gamma: float = 1.0, lambda_: float = 1.0, whiten: bool = True) -> AdvantageOutput:
    """A_t = delta_t + gamma lambda A_next, delta_t = r_t + gamma V_next - V_t (arXiv 1506.02438).

    `next` is the next masked token: V and A pass over tool output unchanged. After the last one stands 0 or, for
    truncated responses with ``final_values``, that value. Returns are A + V before whitening.

    Computed as the recurrence of the returns, G_t = r_t + gamma ((1 - lambda) V_next + lambda G_next) and A = G - V,
    which is the same and, unlike a sum of thousands of delta, does not lose digits when lambda is 1. Raises
    ``ValueError`` naming the sample when a value is not finite.
    """
    assert inputs.values is not None
    kept = Kept.of(inputs.mask, inputs.segments)
    values = kept.pack(inputs.values)
    _refuse_bad_values(values, kept.segments)
    inflow = kept.pack(inputs.token_rewards).to(values.dtype)

    ends, filled = kept.segments.offsets[1:-1], kept.segments.lengths[:-1] > 0
    lasts = torch.where(filled, ends - 1, inputs.segments.tokens)  # [S] the last token; a spare one if there is none
    if lambda_ < 1.0:
        following = torch.cat([values[1:], values.new_zeros(2)])
        following[lasts] = 0
        inflow = torch.add(inflow, following[: values.numel()], alpha=gamma * (1.0 - lambda_))
    if inputs.final_values is not None and inputs.truncated is not None:
        beyond = torch.where(inputs.truncated, inputs.final_values, 0).to(values.dtype)
        spared = torch.cat([inflow, inflow.new_zeros(1)])
        inflow = spared.index_add_(0, lasts, gamma * beyond)[:-1]
    returns = sums_to_the_end(inflow, gamma * lambda_, kept.segments)
    advantages = kept.unpack(returns - values)
    return AdvantageOutput(whitened(advantages, inputs.mask) if whiten else advantages, kept.unpack(returns))


def _refuse_bad_values(values: Tensor, segments: Segments) -> None:
    if not bool(values.sum(dtype=torch.float64).isfinite()):
        refuse_non_finite("values of the critic", segments.sum(values)[:-1])
