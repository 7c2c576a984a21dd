"""The loss of an optimizer step as the learner uses it: policy, KL and entropy of the actor; value loss of the critic.

Losses and metrics of a micro-batch are shares of its mini-batch's: add them up over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rljob_trainer.algorithms.aggregation import LossCounts, aggregate
from rljob_trainer.algorithms.correction import Correction, corrected_in_loss, interpolated_log_probs
from rljob_trainer.algorithms.kl import k3_weighted, kl_estimators
from rljob_trainer.algorithms.policy_losses import (
    LOG_RATIO_BOUND,
    PolicyInputs,
    masked_count,
    masked_sum,
    policy_losses,
)
from rljob_trainer.algorithms.segments import Segments, kept_only, wide


class ActorLossSettings(Protocol):
    """The part of `learner.protocol.LossSettings` that the mathematics reads."""

    @property
    def policy_loss(self) -> str: ...
    @property
    def policy_loss_params(self) -> Mapping[str, Any]: ...
    @property
    def aggregation(self) -> str: ...
    @property
    def aggregation_params(self) -> Mapping[str, Any]: ...
    @property
    def kl_kind(self) -> str | None: ...
    @property
    def kl_coefficient(self) -> float: ...
    @property
    def entropy_coefficient(self) -> float: ...
    @property
    def value_clip(self) -> float | None: ...
    @property
    def correction(self) -> Correction | None: ...


@dataclass(frozen=True, eq=False)
class Loss:
    """A micro-batch's share, with metrics (scalars without gradient) under their public names.

    ``metrics`` add up just as ``loss`` does; of ``extremes`` the largest (names ending in /max) or smallest (/min) over
    micro-batches and ranks counts.
    """

    loss: Tensor  # []
    metrics: dict[str, Tensor]
    extremes: dict[str, Tensor] = field(default_factory=dict)


def actor_loss(inputs: PolicyInputs, settings: ActorLossSettings, counts: LossCounts) -> Loss:
    """policy loss + kl_coefficient * KL(pi_theta, pi_ref) - entropy_coefficient * entropy, each aggregated alike.

    ``counts`` are those of the whole mini-batch over all ranks. ``inputs.weights`` multiply the policy loss only. With
    ``inputs.rollout_share`` pi_old is interpolated between the present policy and pi_roll, and ``settings.correction``
    corrects from pi_roll to it.
    Raises ``ValueError`` for unknown methods or settings and for streams that they need and do not get.
    """
    inputs = inputs.widened()
    mask, segments = inputs.mask, inputs.segments
    made: dict[str, Tensor] = {}
    if inputs.rollout_share is not None:
        inputs, made = _interpolated(inputs, inputs.rollout_share, settings.correction or Correction())

    def aggregated(stream: Tensor) -> Tensor:
        return aggregate(settings.aggregation, stream, segments, mask, counts, **settings.aggregation_params)

    method = policy_losses[settings.policy_loss]
    anchor = inputs.rollout_log_probs if method.needs_rollout_log_probs else inputs.old_log_probs
    policy = method(inputs, **settings.policy_loss_params)
    per_token = policy.per_token
    if inputs.weights is not None:
        per_token = per_token * kept_only(inputs.weights, mask)
    loss = aggregated(per_token)
    totals = {**policy.metrics, **made}
    metrics = {f"actor/{name}": total / max(counts.tokens, 1) for name, total in totals.items()}
    metrics["actor/policy_loss"] = loss.detach()

    if settings.kl_kind is not None:
        kl = _kl_to_reference(replace(inputs, old_log_probs=anchor), settings.kl_kind)
        loss = loss + settings.kl_coefficient * aggregated(kl)
        metrics["kl/in_loss"] = masked_sum(kl, mask) / max(counts.tokens, 1)

    if inputs.entropy is not None:
        metrics["actor/entropy"] = masked_sum(inputs.entropy, mask) / max(counts.tokens, 1)
        if settings.entropy_coefficient != 0.0:
            loss = loss - settings.entropy_coefficient * aggregated(inputs.entropy)
    elif settings.entropy_coefficient != 0.0:
        raise ValueError("entropy_coefficient is not 0, but the entropy of the tokens was not given")
    metrics["actor/loss"] = loss.detach()
    return Loss(_spoiling(loss), metrics, _ratio_extremes(inputs, anchor) if counts.tokens else {})


def _spoiling(loss: Tensor) -> Tensor:
    """The per-token loss, with a gradient that is NaN where the loss is no finite number.

    A clamp or an absolute value passes the gradient 0 for a NaN: the optimizer, which refuses a step by its gradient,
    would not see it.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


def _interpolated(
    inputs: PolicyInputs, share: Tensor, correction: Correction
) -> tuple[PolicyInputs, dict[str, Tensor]]:
    """The inputs with pi_old and its weights filled in, and sums over masked tokens for the metrics."""
    rollout, mask = inputs.rollout("with an interpolated pi_old"), inputs.mask
    old = interpolated_log_probs(rollout, inputs.log_probs, share)
    weights, gone = corrected_in_loss(old, rollout, mask, inputs.segments, correction)
    sums = {"correction_weight": masked_sum(weights, mask), "rejected_fraction": masked_count(gone, mask)}
    return replace(inputs, old_log_probs=old, weights=weights), sums


def _ratio_extremes(inputs: PolicyInputs, anchor: Tensor | None) -> dict[str, Tensor]:
    """The largest and smallest ratio of a masked token (infinitely small and large, if the mini-batch has such tokens
    elsewhere only); nothing when the anchor is the policy itself."""
    if anchor is None or not inputs.segments.tokens:
        return {}
    log_ratio = inputs.log_probs.detach() - anchor
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "actor/ratio/max": torch.where(inputs.mask, bounded, -torch.inf).amax().exp(),
        "actor/ratio/min": torch.where(inputs.mask, bounded, torch.inf).amin().exp(),
    }


def _kl_to_reference(inputs: PolicyInputs, kind: str) -> Tensor:
    if kind == "full":
        if inputs.vocabulary_kl is None:
            raise ValueError("the KL kind full needs `vocabulary_kl`, the exact KL of every token")
        return inputs.vocabulary_kl
    if inputs.ref_log_probs is None:
        raise ValueError(f"a KL in the loss ({kind}) needs the reference's log-probs, which this batch lacks")
    own, reference = (torch.where(inputs.mask, s, 0) for s in (inputs.log_probs, inputs.ref_log_probs))
    if kind == "k3Weighted":
        return k3_weighted(own, reference, inputs.cleaned().ratio)
    return kl_estimators[kind](own, reference)


def critic_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    segments: Segments,
    settings: ActorLossSettings,
    counts: LossCounts,
    old_values: Tensor | None = None,
) -> Loss:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), aggregated as the actor's loss.

    All streams ``[tokens]``; c is ``settings.value_clip``, None for no clip (then ``old_values`` is not needed).
    """
    values, returns = kept_only(wide(values), mask), kept_only(wide(returns), mask)
    error = (values - returns).square()
    metrics: dict[str, Tensor] = {}
    if settings.value_clip is not None:
        if old_values is None:
            raise ValueError("value_clip needs the values at sampling time, which this batch lacks")
        anchor = kept_only(wide(old_values), mask)
        near = torch.clamp(values, anchor - settings.value_clip, anchor + settings.value_clip)
        clipped = (near - returns).square()
        metrics["critic/clip_fraction"] = masked_count(clipped > error, mask) / max(counts.tokens, 1)
        error = torch.maximum(error, clipped)
    loss = aggregate(settings.aggregation, 0.5 * error, segments, mask, counts, **settings.aggregation_params)
    metrics["critic/value_loss"] = metrics["critic/loss"] = loss.detach()
    metrics["critic/prediction/mean"] = masked_sum(values, mask) / max(counts.tokens, 1)
    return Loss(_spoiling(loss), metrics)
