"""Losses with one ratio for a whole sequence: the geometric mean of its tokens' ratios.

Each gives every token of a sequence its sequence's loss; with seqMeanTokenMean, their papers' aggregation, that is the
mean over sequences. Other aggregations are honoured too (tokenMean weighs sequences by length).
"""

from __future__ import annotations

import torch

from rljob_trainer.algorithms.clipped_losses import clipped_objective
from rljob_trainer.algorithms.policy_losses import (
    LOG_RATIO_BOUND,
    PolicyInputs,
    PolicyLossOutput,
    masked_count,
    policy_loss,
    ratio_metrics,
)


@policy_loss("gspo", aggregation="seqMeanTokenMean")
def gspo(inputs: PolicyInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> PolicyLossOutput:
    """PPO's clip of the sequence's ratio s = exp(mean_t log rho_t) (arXiv 2507.18071).

    Token t uses sg(s) pi_t / sg(pi_t): the value of s, and a gradient that also serves advantages which differ from
    token to token (GSPO-token; the same as GSPO when they do not).
    """
    segments, mask = inputs.segments, inputs.mask
    mean = segments.spread(segments.mean(inputs.log_ratio.detach(), mask))
    log_ratio = inputs.log_probs - inputs.log_probs.detach() + mean
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    output = clipped_objective(ratio, inputs.advantages, mask, clip_low=clip_low, clip_high=clip_high)
    return PolicyLossOutput(output.per_token, output.metrics | ratio_metrics(inputs))


@policy_loss("gmpo", aggregation="seqMeanTokenMean")
def gmpo(inputs: PolicyInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> PolicyLossOutput:
    """-A exp(mean_t l_t), l_t = log rho_t clipped to [-clip_low, clip_high] (arXiv 2507.20673).

    As in PPO the clip only binds where it takes gain away: above for A > 0, below for A < 0. A is the mean of the
    sequence's advantages.
    """
    segments, mask = inputs.segments, inputs.mask
    log_ratio = inputs.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    clipped = torch.where(inputs.advantages >= 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    ratio = segments.mean(clipped, mask).exp()
    loss = -segments.mean(inputs.advantages, mask) * ratio
    held = clipped != log_ratio
    metrics = ratio_metrics(inputs) | {
        "clip_fraction": masked_count(held, mask),
        "clip_fraction_low": masked_count(held & (inputs.advantages < 0), mask),
    }
    return PolicyLossOutput(segments.spread(loss), metrics)
