"""Losses of the form -A weight log pi: policy gradients whose importance weight carries no gradient.

rho = pi_theta / pi_old; sg() stops the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

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
from rljob_trainer.algorithms.weights import WeightLevel, importance_ratio, within_bounds


@policy_loss("reinforce")
def reinforce(inputs: PolicyInputs) -> PolicyLossOutput:
    """-A log pi (Williams 1992)."""
    return PolicyLossOutput(-inputs.advantages * inputs.log_probs, ratio_metrics(inputs))


@policy_loss("gpg")
def gpg(inputs: PolicyInputs) -> PolicyLossOutput:
    """-A log pi, with the advantages of the estimator gpg (arXiv 2504.02546)."""
    return PolicyLossOutput(-inputs.advantages * inputs.log_probs, ratio_metrics(inputs))


@policy_loss("cispo")
def cispo(inputs: PolicyInputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> PolicyLossOutput:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi (arXiv 2506.13585): no token loses its gradient."""
    ratio = inputs.ratio.detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    metrics = ratio_metrics(inputs) | {"clip_fraction": masked_count(weight != ratio, inputs.mask)}
    return PolicyLossOutput(-weight * inputs.advantages * inputs.log_probs, metrics)


@policy_loss("tis")
def tis(inputs: PolicyInputs, *, ratio_cap: float = 2.0) -> PolicyLossOutput:
    """-sg(min(rho, ratio_cap)) A log pi: truncated importance sampling (Ionides 2008; arXiv 1802.01561, section 4)."""
    ratio = inputs.ratio.detach()
    metrics = ratio_metrics(inputs) | {"clip_fraction": masked_count(ratio > ratio_cap, inputs.mask)}
    return PolicyLossOutput(-ratio.clamp(max=ratio_cap) * inputs.advantages * inputs.log_probs, metrics)


@policy_loss("dppoTv")
def dppo_tv(
    inputs: PolicyInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, ratio_cap: float = 20.0
) -> PolicyLossOutput:
    """-sg(min(rho, ratio_cap)) A log pi, for tokens inside a trust region of total variation (arXiv 2602.04879).

    A token with A > 0 is left out once pi - pi_old > clip_high, one with A <= 0 once pi - pi_old < -clip_low.
    """
    moved = inputs.log_probs.detach().exp() - inputs.anchor.exp()
    kept = torch.where(inputs.advantages > 0, moved <= clip_high, moved >= -clip_low)
    return _trusted(inputs, kept, ratio_cap)


@policy_loss("dppoKl")
def dppo_kl(inputs: PolicyInputs, *, divergence_threshold: float = 0.05, ratio_cap: float = 20.0) -> PolicyLossOutput:
    """The same with the KL between "this token" and "any other" as distance (arXiv 2602.04879).

    KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)). A token beyond
    ``divergence_threshold`` is left out if its advantage would push it further: A > 0 and p > p_old, or A <= 0 and
    p < p_old.
    """
    log_new, log_old = inputs.log_probs.detach(), inputs.anchor
    old = log_old.exp()
    rest_new, rest_old = -torch.expm1(log_new), -torch.expm1(log_old)
    divergence = old * (log_old - log_new) + rest_old * torch.log((rest_old + 1e-8) / (rest_new + 1e-8))
    outward = torch.where(inputs.advantages > 0, log_new > log_old, log_new < log_old)
    return _trusted(inputs, (divergence <= divergence_threshold) | ~outward, ratio_cap)


def _trusted(inputs: PolicyInputs, kept: Tensor, ratio_cap: float) -> PolicyLossOutput:
    weight = torch.where(kept, inputs.ratio.detach().clamp(max=ratio_cap), 0)
    metrics = ratio_metrics(inputs) | {"clip_fraction": masked_count(~kept, inputs.mask)}
    return PolicyLossOutput(-weight * inputs.advantages * inputs.log_probs, metrics)


@policy_loss("bypassReinforce", needs_rollout_log_probs=True)
def bypass_reinforce(
    inputs: PolicyInputs,
    *,
    level: WeightLevel | Literal["none"] = "sequence",
    low: float | None = None,
    high: float = 2.0,
    rejection: Sequence[Rejection] = (),
) -> PolicyLossOutput:
    """-w A log pi, w = sg(pi_theta / pi_roll) of the token or of its whole sequence.

    No forward pass for pi_old is needed. w is cut at ``high``; with ``low`` given, weights outside [low, high] become
    0; level "none" means w = 1. ``rejection`` as in bypassPpoClip.
    """
    anchored = replace(inputs, old_log_probs=inputs.rollout("bypassReinforce"))
    log_ratio = anchored.log_ratio.detach()
    metrics = ratio_metrics(anchored)
    weight = torch.ones_like(log_ratio)
    if level != "none":
        ratio = importance_ratio(log_ratio, inputs.mask, inputs.segments, level)
        ratio = inputs.segments.spread(ratio) if level == "sequence" else ratio
        weight = within_bounds(ratio, low, high)
        metrics["clip_fraction"] = masked_count(weight != ratio, inputs.mask)
    if rejection:
        gone = rejected(log_ratio, inputs.mask, inputs.segments, rejection)
        weight = torch.where(gone, 0, weight)
        metrics["rejected_fraction"] = masked_count(gone, inputs.mask)
    return PolicyLossOutput(-weight * inputs.advantages * inputs.log_probs, metrics)
