"""Losses with PPO's clipped ratio: PPO itself, its off-policy relatives."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.policy_losses import (
    PolicyInputs,
    PolicyLossOutput,
    masked_count,
    masked_sum,
    policy_loss,
)


def clipped_objective(
    ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLossOutput:
    """PPO's loss of each token for a given ratio.

    L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) (arXiv 1707.06347, eq. 7; two bounds: arXiv 2503.14476,
    eq. 10); where A < 0, L = min(L, -A dual_clip) (arXiv 1912.09729, eq. 5).
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics = {"clip_fraction": masked_count(clipped > plain, mask)}
    if dual_clip is not None:
        if dual_clip <= 1.0:
            raise ValueError(f"dual_clip must be above 1 (3 is usual), but is {dual_clip}")
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > bound)
        metrics["dual_clip_fraction"] = masked_count(beyond, mask)
        loss = torch.where(beyond, bound, loss)
    return PolicyLossOutput(loss, metrics)


@policy_loss("ppoClip")
def ppo_clip(
    inputs: PolicyInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> PolicyLossOutput:
    """PPO's clipped loss of rho = pi_theta / pi_old; see `clipped_objective`. ``dual_clip`` bounds what a negative
    advantage can cost (3 is usual); None switches it off."""
    output = clipped_objective(inputs.ratio, inputs.advantages, inputs.mask, clip_low, clip_high, dual_clip)
    return PolicyLossOutput(output.per_token, output.metrics | ratio_metrics(inputs))


def ratio_metrics(inputs: PolicyInputs) -> dict[str, Tensor]:
    """How far the policy has moved from its anchor: sums of rho and of -log rho (the k1 estimate of the KL)."""
    return {
        "ratio/mean": masked_sum(inputs.ratio, inputs.mask),
        "approx_kl": masked_sum(-inputs.log_ratio, inputs.mask),
    }
