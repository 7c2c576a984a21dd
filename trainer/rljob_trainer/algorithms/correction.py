"""Rollout correction: what is done about engine and trainer not being the same policy, and how far apart they are.

pi_roll sampled the tokens; pi_old is the trainer's policy that anchors the ratio. Decoupled mode corrects
pi_old / pi_roll once a batch, here: weights multiply the loss, rejection narrows the mask. Bypass mode (pi_old :=
pi_roll) does the same inside its losses, `bypassPpoClip` and `bypassReinforce`. What rejection and weights are is in
files of those names, published settings in `rljob_api.correction_presets`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rljob_trainer.algorithms.mismatch import DifferenceSeen, LogRatios, LossSeen, RuleSeen, WeightsSeen
from rljob_trainer.algorithms.moments import floats, joined
from rljob_trainer.algorithms.rejection import Rejection, judge, rejected
from rljob_trainer.algorithms.segments import NotFiniteError, Segments, kept_only, wide
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


@torch.no_grad()
def correct(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    segments: Segments,
    correction: Correction,
) -> Corrected:
    """Weights, narrowed mask and the whole set of ``rollout_correction/...`` metrics of one batch.

    Log-probs ``[tokens]`` at the sampling temperature; what stands at masked positions does not matter. Weights use the
    given mask, not the narrowed one, so that neither part depends on the other. Raises ``NotFiniteError`` naming the
    sequence when a log-prob of a masked token is NaN.
    """
    old_log_probs, rollout_log_probs = wide(old_log_probs), wide(rollout_log_probs)
    settings, rules = correction.weights, correction.rejection
    weights = None if settings is None else torch.empty_like(old_log_probs)
    kept = torch.empty_like(mask) if rules else mask
    differences, weighed = [], []
    judged: list[list[RuleSeen]] = [[] for _ in rules]
    lost: list[list[LossSeen]] = [[] for _ in (*rules, None)]  # to each rule, and to all together
    for piece in segments.pieces:
        part = piece.tokens
        here = LogRatios.of(old_log_probs[part], rollout_log_probs[part], mask[part], piece.segments)
        differences.append(DifferenceSeen.of(here))
        if settings is not None and weights is not None:
            ratio = importance_ratio(here.log_ratio, here.mask, here.segments, settings.level)
            cut = within_bounds(ratio, settings.low, settings.high, clamp=settings.clamp)
            weighed.append(WeightsSeen.of(here, ratio, cut, settings))
            weights[part] = kept_only(here.segments.spread(cut) if settings.level == "sequence" else cut, here.mask)
        if rules:
            gone = torch.zeros_like(here.mask)
            for number, rule in enumerate(rules):
                verdict = judge(here.log_ratio, here.rollout, here.mask, here.segments, rule)
                out = here.mask & (verdict.out if rule.over == "token" else here.segments.spread(verdict.out))
                judged[number].append(RuleSeen.of(here, rule, verdict))
                lost[number].append(LossSeen.of(here, out))
                gone |= out
            lost[-1].append(LossSeen.of(here, gone))
            kept[part] = here.mask & ~gone

    difference = joined(differences)
    if bool(difference.log_ratio.isnan().any()):
        _refuse_nan(old_log_probs, rollout_log_probs, mask, segments)
    metrics = difference.metrics()
    if settings is not None and weights is not None:
        seen = joined(weighed)
        metrics |= seen.metrics(settings)
        divisor = seen.divisor(settings)
        if divisor is not None:
            weights /= divisor
    for number, rule in enumerate(rules):
        metrics |= joined(judged[number]).metrics(rule) | joined(lost[number]).metrics(rule)
    if rules:
        metrics |= joined(lost[-1]).metrics()
    return Corrected(kept, weights, floats(metrics))


def _refuse_nan(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, segments: Segments) -> None:
    bad = (old_log_probs - rollout_log_probs).isnan() & mask
    if bool(bad.any()):
        token = int(bad.nonzero()[0])
        row, position = segments.place_of(token)
        raise NotFiniteError(
            f"a log-probability of sequence {row} of this batch is NaN (its response token "
            f"{position}): the model or the engine produced it",
            row,
        )


def rollout_share(age: Tensor) -> Tensor:
    """``[tokens]`` float32: alpha = 1 / age, 0 for a token of the present version (A-3PO, arXiv 2512.06547)."""
    return torch.where(age > 0, 1.0 / age.clamp(min=1).to(torch.float32), 0)


def interpolated_log_probs(rollout_log_probs: Tensor, log_probs: Tensor, share: Tensor) -> Tensor:
    """``[tokens]``: a stand-in for log pi_old that needs no forward pass (A-3PO, arXiv 2512.06547).

    alpha log pi_roll + (1 - alpha) log pi_theta, alpha = ``share`` (`rollout_share`): a token of the present version is
    anchored at the current policy, one that is a version old at the policy that sampled it. ``log_probs`` are used
    without gradient.
    """
    return torch.lerp(log_probs.detach(), rollout_log_probs, share.to(log_probs.dtype))


@torch.no_grad()
def corrected_in_loss(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, segments: Segments, correction: Correction
) -> tuple[Tensor, Tensor]:
    """``correct`` for a micro-batch of whole sequences, whose pi_old is only known in the loss.

    Returns ``[tokens]`` weights, 0 where a rule rejects (the counts by which losses are divided stay), and ``[tokens]``
    bool: what was rejected. Weights cannot be normalised here, for want of the rest of the batch.
    """
    settings = correction.weights
    log_ratio = kept_only(old_log_probs - rollout_log_probs, mask)
    weights = torch.ones_like(log_ratio)
    if settings is not None:
        ratio = importance_ratio(log_ratio, mask, segments, settings.level)
        ratio = segments.spread(ratio) if settings.level == "sequence" else ratio
        weights = within_bounds(ratio, settings.low, settings.high, clamp=settings.clamp)
    gone = rejected(log_ratio, kept_only(rollout_log_probs, mask), mask, segments, correction.rejection)
    return torch.where(gone | ~mask, 0, weights), gone
