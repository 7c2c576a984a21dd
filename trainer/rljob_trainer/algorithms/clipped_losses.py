"""Losses with PPO's clipped ratio: PPO itself, and PPO anchored at the policy that sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rljob_trainer.algorithms.policy_losses import (
    PolicyInputs,
    PolicyLossOutput,
    masked_count,
    policy_loss,
    ratio_metrics,
)
from rljob_trainer.algorithms.rejection import Rejection, rejected


def clipped_objective(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLossOutput:
    """PPO's loss of each token for a given ratio.

    L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) (arXiv 1707.06347, eq. 7; two bounds: arXiv 2503.14476,
    section 3.1); where A < 0, L = min(L, -A dual_clip) (arXiv 1912.09729).
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    held = clipped > plain
    metrics = {
        "clip_fraction": masked_count(held, mask),
        "clip_fraction_low": masked_count(held & (advantages < 0), mask),
    }
    if dual_clip:
        if dual_clip <= 1.0:
            raise ValueError(f"dual_clip must be above 1 (3 is usual), but is {dual_clip}")
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > bound)
        metrics["dual_clip_fraction"] = masked_count(beyond, mask)
        loss = torch.where(beyond, bound, loss)
    return PolicyLossOutput(loss, metrics)


def without_gradient(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """``[tokens]`` bool: those for which `clipped_objective` is constant, so that nothing pushes them."""
    held = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high) > -advantages * ratio
    return held | ((advantages < 0) & (ratio > dual_clip)) if dual_clip else held


@policy_loss("ppoClip")
def ppo_clip(
    inputs: PolicyInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> PolicyLossOutput:
    """PPO's clipped loss of rho = pi_theta / pi_old; see `clipped_objective`.

    ``dual_clip`` bounds what a negative advantage can cost (3 is usual); None or 0 switches it off.
    """
    output = clipped_objective(
        inputs.ratio, inputs.advantages, inputs.mask, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return PolicyLossOutput(output.per_token, output.metrics | ratio_metrics(inputs))


@policy_loss("bypassPpoClip", needs_rollout_log_probs=True)
def bypass_ppo_clip(
    inputs: PolicyInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    rejection: Sequence[Rejection] = (),
) -> PolicyLossOutput:
    """PPO with the policy that sampled as anchor, rho = pi_theta / pi_roll: no forward pass for pi_old is needed.

    The ratio is the importance weight, so there is none beside it. ``rejection`` compares the present policy (without
    gradient) with pi_roll; rejected tokens lose their gradient, the counts by which losses are divided stay.
    """
    rollout = inputs.rollout("bypassPpoClip")
    anchored = replace(inputs, old_log_probs=rollout)
    output = clipped_objective(
        anchored.ratio, inputs.advantages, inputs.mask, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    per_token, metrics = output.per_token, output.metrics | ratio_metrics(anchored)
    if rejection:
        rollout = torch.where(inputs.mask, rollout, 0)
        gone = rejected(anchored.log_ratio.detach(), rollout, inputs.mask, inputs.segments, rejection)
        per_token = torch.where(gone, 0, per_token)
        metrics["rejected_fraction"] = masked_count(gone, inputs.mask)
    return PolicyLossOutput(per_token, metrics)
