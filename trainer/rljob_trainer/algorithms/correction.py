"""Rollout correction: what is done about engine and trainer not being the same policy, and how far apart they are.

pi_roll sampled the tokens; pi_old is the trainer's policy that anchors the ratio. Decoupled mode corrects
pi_old / pi_roll once a batch, here: weights multiply the loss, rejection narrows the mask. Bypass mode (pi_old :=
pi_roll) does the same inside its losses, `bypassPpoClip` and `bypassReinforce`. What rejection and weights are is in
files of those names, published settings are in `correction_presets`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rljob_trainer.algorithms.mismatch import difference_metrics, rule_metrics, weight_metrics
from rljob_trainer.algorithms.rejection import Rejection, judge
from rljob_trainer.algorithms.segments import Segments, masked_mean
from rljob_trainer.algorithms.weights import Weights, importance_ratio, within_bounds


@dataclass(frozen=True)
class Correction:
    """What to do. Neither weights nor rejection: only the diagnostics."""

    weights: Weights | None = None
    rejection: tuple[Rejection, ...] = ()


@dataclass(frozen=True, eq=False)
class Corrected:
    """``mask [tokens]`` without what was rejected; ``weights [tokens]`` (0 where the given mask was False) or None."""

    mask: Tensor
    weights: Tensor | None
    metrics: dict[str, float] = field(default_factory=dict)
    worst: tuple[int, ...] = ()
    """The sequences (positions in the batch) that trainer and engine disagree most about, worst first."""


@torch.no_grad()
def correct(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    segments: Segments,
    correction: Correction,
    *,
    worst: int = 5,
) -> Corrected:
    """Weights, narrowed mask and the whole set of ``rollout_correction/...`` metrics of one batch.

    Log-probs ``[tokens]`` at the sampling temperature; what stands at masked positions does not matter. Weights use the
    given mask, not the narrowed one, so that neither part depends on the other. Raises ``ValueError`` naming the
    sequence when a log-prob of a masked token is NaN.
    """
    old = torch.where(mask, old_log_probs, 0)
    log_ratio = old - torch.where(mask, rollout_log_probs, 0)
    _refuse_nan(log_ratio, segments)

    metrics, disagreement = difference_metrics(old, log_ratio, mask, segments)
    weights = None
    if correction.weights is not None:
        weights, more = _weights(log_ratio, mask, segments, correction.weights)
        metrics |= more

    kept = mask
    for rule in correction.rejection:
        verdict = judge(log_ratio, mask, segments, rule)
        out = mask & (verdict.out if rule.over == "token" else segments.spread(verdict.out))
        metrics |= rule_metrics(rule, verdict, out, mask, segments)
        kept = kept & ~out
    if correction.rejection:
        gone = segments.count(mask & ~kept)
        present = segments.count(mask)
        root = "rollout_correction/rejection"
        metrics[f"{root}/masked_ratio"] = int(gone.sum()) / max(int(present.sum()), 1)
        metrics[f"{root}/masked_sequence_ratio"] = int((gone > 0).sum()) / max(int((present > 0).sum()), 1)

    count = min(worst, len(segments))
    return Corrected(kept, weights, metrics, tuple(torch.topk(disagreement, count).indices.tolist()))


def _weights(log_ratio: Tensor, mask: Tensor, segments: Segments, settings: Weights) -> tuple[Tensor, dict[str, float]]:
    ratio = importance_ratio(log_ratio, mask, segments, settings.level)
    weights = within_bounds(ratio, settings.low, settings.high)
    counted = mask if settings.level == "token" else segments.count(mask) > 0
    divisor: Tensor | None = None
    if settings.normalize:
        mean = masked_mean(weights, counted)
        divisor = torch.where(mean > 0, mean, 1.0)  # all of them zeroed: nothing to scale
        weights = weights / divisor
    metrics = weight_metrics(ratio, weights, counted, mask, segments, settings, divisor)
    per_token = weights if settings.level == "token" else segments.spread(weights)
    return torch.where(mask, per_token, 0), metrics


def _refuse_nan(log_ratio: Tensor, segments: Segments) -> None:
    if bool(log_ratio.isnan().any()):
        token = int(log_ratio.isnan().nonzero()[0])
        row = int(torch.searchsorted(segments.offsets, token, right=True)) - 1
        raise ValueError(
            f"a log-probability of sequence {row} of this batch is NaN (its response token "
            f"{token - int(segments.offsets[row])}): the model or the engine produced it"
        )


def interpolated_log_probs(rollout_log_probs: Tensor, log_probs: Tensor, age: Tensor) -> Tensor:
    """``[tokens]``: a stand-in for log pi_old that needs no forward pass (A-3PO, arXiv 2512.06547).

    alpha log pi_roll + (1 - alpha) log pi_theta, alpha = 1 / age: a token of the present version (age 0) is anchored
    at the current policy, one that is a version old at the policy that sampled it. ``log_probs`` are used without
    gradient.
    """
    alpha = torch.where(age > 0, 1.0 / age.clamp(min=1).to(log_probs.dtype), 0)
    return torch.lerp(log_probs.detach(), rollout_log_probs, alpha)
