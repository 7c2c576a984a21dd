"""Losses that spare the few tokens whose log-probability and advantage rise together: they drive entropy collapse.

cov = (A - mean A) (log pi - mean log pi), means over the whole mini-batch (arXiv 2505.22617, section 4.2). Which tokens
are selected is decided once for the mini-batch, from a forward pass without gradient, by `PolicyLoss.select_tokens`:
neither micro-batches nor ranks change it. Of N tokens floor(covariance_fraction N) are selected and at least one, as
the published code does; fewer only where there are fewer candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.clipped_losses import clipped_objective, without_gradient
from rljob_trainer.algorithms.policy_losses import (
    PolicyInputs,
    PolicyLossOutput,
    masked_count,
    masked_sum,
    policy_loss,
    ratio_metrics,
)
from rljob_trainer.algorithms.segments import masked_mean


def _covariance(inputs: PolicyInputs) -> Tensor:
    advantages = inputs.advantages - masked_mean(inputs.advantages, inputs.mask)
    return advantages * (inputs.log_probs - masked_mean(inputs.log_probs, inputs.mask))


def _wanted(inputs: PolicyInputs, fraction: float) -> int:
    return max(int(fraction * int(inputs.mask.sum())), 1)


def _largest(score: Tensor, candidates: Tensor, wanted: int) -> Tensor:
    """``[tokens]`` bool: the ``wanted`` candidates with the largest score (all, if there are fewer)."""
    chosen = torch.zeros_like(candidates)
    count = min(wanted, int(candidates.sum()))
    if count:
        chosen[torch.topk(torch.where(candidates, score, -torch.inf), count).indices] = True
    return chosen


def select_for_clip(
    inputs: PolicyInputs,
    generator: torch.Generator,
    *,
    covariance_fraction: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    exclude_clipped: bool = True,
) -> Tensor:
    """Random tokens among those with covariance_low < cov < covariance_high; draws from ``generator``.

    With ``exclude_clipped`` (the published code) none of those that PPO's clip leaves without gradient already.
    """
    covariance = _covariance(inputs)
    candidates = inputs.mask & (covariance > covariance_low) & (covariance < covariance_high)
    if exclude_clipped:
        candidates &= ~without_gradient(
            inputs.ratio, inputs.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
        )
    draw = torch.rand(covariance.numel(), generator=generator, dtype=torch.float64, device=generator.device)
    return _largest(draw.to(covariance.device), candidates, _wanted(inputs, covariance_fraction))


@policy_loss("clipCov", selector=select_for_clip)
def clip_cov(
    inputs: PolicyInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    covariance_fraction: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
    exclude_clipped: bool = True,
) -> PolicyLossOutput:
    """PPO's clipped loss, 0 for the selected tokens (Clip-Cov, arXiv 2505.22617).

    The paper's formula draws among all tokens in the range of covariances; its published code leaves out those that
    PPO has clipped, which have no gradient to lose. That is the default; ``exclude_clipped=False`` is the formula.
    """
    assert inputs.selection is not None
    output = clipped_objective(
        inputs.ratio, inputs.advantages, inputs.mask, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    metrics = output.metrics | ratio_metrics(inputs)
    metrics["selected_fraction"] = masked_count(inputs.selection, inputs.mask)
    return PolicyLossOutput(torch.where(inputs.selection, 0, output.per_token), metrics)


def select_for_kl(
    inputs: PolicyInputs,
    generator: torch.Generator,
    *,
    covariance_fraction: float = 2e-4,
    kl_coefficient: float = 0.1,
) -> Tensor:
    """The tokens with the largest covariance."""
    return _largest(_covariance(inputs), inputs.mask, _wanted(inputs, covariance_fraction))


@policy_loss("klCov", selector=select_for_kl)
def kl_cov(inputs: PolicyInputs, *, covariance_fraction: float = 2e-4, kl_coefficient: float = 0.1) -> PolicyLossOutput:
    """-A rho, plus kl_coefficient |log rho| on the selected tokens (KL-Cov, arXiv 2505.22617)."""
    assert inputs.selection is not None
    penalty = torch.where(inputs.selection, kl_coefficient * inputs.log_ratio.abs(), 0)
    metrics = ratio_metrics(inputs) | {
        "selected_fraction": masked_count(inputs.selection, inputs.mask),
        "absolute_kl": masked_sum(inputs.log_ratio.abs(), inputs.mask),
    }
    return PolicyLossOutput(penalty - inputs.advantages * inputs.ratio, metrics)
