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
from rljob_trainer.algorithms.rejection import Rejection, binary_kl, rejected
from rljob_trainer.algorithms.segments import masked_mean
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
def dppo_kl(
    inputs: PolicyInputs, *, divergence_low: float = 0.05, divergence_high: float = 0.05, ratio_cap: float = 20.0
) -> PolicyLossOutput:
    """DPPO with the KL between "this token" and "any other" as distance (arXiv 2602.04879).

    KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)). A token is left out if its advantage would push
    it further: with A > 0 and p > p_old beyond ``divergence_high``, with A <= 0 and p < p_old beyond
    ``divergence_low``.
    """
    log_new, log_old = inputs.log_probs.detach().clamp(max=0), inputs.anchor.clamp(max=0)
    divergence = binary_kl(log_old, log_new)
    up = (divergence <= divergence_high) | (log_new <= log_old)
    down = (divergence <= divergence_low) | (log_new >= log_old)
    return _trusted(inputs, torch.where(inputs.advantages > 0, up, down), ratio_cap)


def _trusted(inputs: PolicyInputs, kept: Tensor, ratio_cap: float) -> PolicyLossOutput:
    ratio = inputs.ratio.detach()
    weight = torch.where(kept, ratio.clamp(max=ratio_cap), 0)
    metrics = ratio_metrics(inputs) | {
        "clip_fraction": masked_count(~kept, inputs.mask),
        "clip_fraction_low": masked_count(~kept & (inputs.advantages <= 0), inputs.mask),
        "cap_fraction": masked_count(kept & (ratio > ratio_cap), inputs.mask),
    }
    return PolicyLossOutput(-weight * inputs.advantages * inputs.log_probs, metrics)


def mean_weight(
    inputs: PolicyInputs,
    generator: torch.Generator,
    *,
    level: WeightLevel | Literal["none"] = "sequence",
    low: float | None = None,
    high: float = 2.0,
    normalize: bool = False,
    clamp: bool = False,
    rejection: Sequence[Rejection] = (),
) -> Tensor:
    """What bypassReinforce divides its weights by: their mean at every token; 1 if there is none, or all are 0."""
    log_ratio = inputs.log_probs - inputs.rollout("bypassReinforce")
    mean = log_ratio.new_zeros(())
    if level != "none":
        of_tokens = level == "token"
        counted = inputs.mask if of_tokens else inputs.segments.count(inputs.mask) > 0
        ratio = importance_ratio(log_ratio, inputs.mask, inputs.segments, level)
        weight = within_bounds(ratio, low, high, clamp=clamp)
        mean = masked_mean(weight.double(), counted)
    return torch.where(mean > 0, mean, 1.0).expand(inputs.mask.shape)


@policy_loss("bypassReinforce", needs_rollout_log_probs=True, selector=mean_weight, selects_if="normalize")
def bypass_reinforce(
    inputs: PolicyInputs,
    *,
    level: WeightLevel | Literal["none"] = "sequence",
    low: float | None = None,
    high: float = 2.0,
    normalize: bool = False,
    clamp: bool = False,
    rejection: Sequence[Rejection] = (),
) -> PolicyLossOutput:
    """-w A log pi, w = sg(pi_theta / pi_roll) of the token or of its whole sequence.

    No forward pass for pi_old is needed. w is cut at ``high``; with ``low`` given, weights outside [low, high] become
    0, or with ``clamp`` the nearer bound; level "none" means w = 1. ``normalize`` divides by the mean w of the whole
    mini-batch (over tokens or sequences, as the level says), for one more forward pass. ``rejection`` as in
    bypassPpoClip.
    """
    rollout = inputs.rollout("bypassReinforce")
    anchored = replace(inputs, old_log_probs=rollout)
    log_ratio = anchored.log_ratio.detach()
    metrics = ratio_metrics(anchored)
    weight = torch.ones_like(log_ratio)
    if level != "none":
        ratio = importance_ratio(log_ratio, inputs.mask, inputs.segments, level)
        ratio = inputs.segments.spread(ratio) if level == "sequence" else ratio
        weight = within_bounds(ratio, low, high, clamp=clamp)
        metrics["clip_fraction"] = masked_count(weight != ratio, inputs.mask)
        if normalize:
            assert inputs.selection is not None
            weight = weight / inputs.selection.to(weight.dtype)
    if rejection:
        rollout = torch.where(inputs.mask, rollout, 0)
        gone = rejected(log_ratio, rollout, inputs.mask, inputs.segments, rejection)
        weight = torch.where(gone, 0, weight)
        metrics["rejected_fraction"] = masked_count(gone, inputs.mask)
    return PolicyLossOutput(-weight * inputs.advantages * inputs.log_probs, metrics)
