"""KL divergence from the reference, estimated per token from the log-probs of sampled tokens.

With d = log pi_theta - log pi_ref: k1 = d, k2 = d^2 / 2, k3 = e^-d + d - 1 >= 0 (http://joschu.net/blog/kl-approx.html).
As a loss, k1's gradient has expectation 0 and k3's is biased; the straight-through variants keep the value of k1, k3 or
abs and take k2's gradient, whose expectation is that of the KL itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_trainer.algorithms.registry import Method, Registry
from rljob_trainer.algorithms.segments import NotFiniteError, Segments, kept_only, wide

EXPONENT_BOUND = 20.0
K3_BOUND = 10.0


@dataclass(frozen=True)
class KlEstimator(Method[Tensor]):
    """``(log_probs [tokens], ref_log_probs [tokens]) -> [tokens]``."""


kl_estimators: Registry[KlEstimator] = Registry("KL estimator")


def kl_estimator(name: str) -> Callable[[Callable[..., Tensor]], KlEstimator]:
    """Registers an estimator under the name used in job files."""

    def register(function: Callable[..., Tensor]) -> KlEstimator:
        return kl_estimators.add(KlEstimator(name, function))

    return register


@kl_estimator("k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d: unbiased, of either sign."""
    return log_probs - ref_log_probs


@kl_estimator("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|d|."""
    return (log_probs - ref_log_probs).abs()


@kl_estimator("k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d^2 / 2."""
    return 0.5 * (log_probs - ref_log_probs).square()


@kl_estimator("k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """e^-d + d - 1, with d clamped to +-20 and the result to at most 10."""
    d = (log_probs - ref_log_probs).clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
    return (torch.expm1(-d) + d).clamp(max=K3_BOUND)


@kl_estimator("k1Straight")
def k1_straight(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The value of k1 with the gradient of k2."""
    return _straight_through(k1(log_probs, ref_log_probs), k2(log_probs, ref_log_probs))


@kl_estimator("k3Straight")
def k3_straight(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2."""
    return _straight_through(k3(log_probs, ref_log_probs), k2(log_probs, ref_log_probs))


@kl_estimator("absStraight")
def abs_straight(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The value of abs with the gradient of k2."""
    return _straight_through(absolute(log_probs, ref_log_probs), k2(log_probs, ref_log_probs))


def k3_weighted(log_probs: Tensor, ref_log_probs: Tensor, ratio: Tensor) -> Tensor:
    """k3 times ``ratio [tokens]`` = pi_theta / pi_old, unbiased for samples of pi_old (DeepSeek-V3.2, arXiv 2512.02556,
    section 3.1, "Unbiased KL Estimate").

    The gradient flows through both factors, which makes it ratio * d, k2's times the ratio. It is written so because
    where k3 is at its bound, the ratio alone would push the wrong way.
    """
    ratio = ratio.detach()
    return _straight_through(ratio * k3(log_probs, ref_log_probs), ratio * k2(log_probs, ref_log_probs))


def _straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    return value.detach() + (gradient - gradient.detach())


def kl_penalised_rewards(
    scores: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    segments: Segments,
    *,
    kind: str = "k1",
    coefficient: float,
    vocabulary_kl: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token rewards ``[tokens]``: at every masked token - coefficient * KL, at each sequence's last one + its score.

    Also returns the mean KL ``[]`` over sequences of each one's mean over tokens: what an adaptive controller watches.
    ``scores [S]``; log-probs ``[tokens]`` of the policy that sampled (pi_old) and of the reference. The kind ``full``
    takes ``vocabulary_kl [tokens]``, the exact KL of these two, in place of an estimate from one token. Raises
    ``NotFiniteError`` naming the model and the sample for a masked KL that is no finite number.
    """
    if kind == "full" and vocabulary_kl is None:
        raise ValueError("the KL kind full needs `vocabulary_kl`, the exact KL of every token")
    log_probs, ref_log_probs = wide(log_probs), wide(ref_log_probs)
    with torch.no_grad():
        estimate = kl_estimators[kind](log_probs, ref_log_probs) if vocabulary_kl is None else wide(vocabulary_kl)
        kl = kept_only(estimate, mask)
        if not bool(kl.sum().isfinite()):
            _refuse_non_finite(kl, {"policy": log_probs, "reference": ref_log_probs}, segments)
        score_here = torch.where(segments.is_last(mask), segments.spread(scores.to(kl.dtype)), 0)
        with_tokens = (segments.count(mask) > 0).sum().clamp(min=1)
        return score_here - coefficient * kl, segments.mean(kl, mask).sum() / with_tokens


def _refuse_non_finite(kl: Tensor, log_probs: Mapping[str, Tensor], segments: Segments) -> None:
    """Before it is added to the reward, which would be blamed for it. ``log_probs``: of each model."""
    bad = (~kl.isfinite()).nonzero().flatten()
    if not len(bad):  # finite ones whose sum is not
        return
    token = int(bad[0])
    row, position = segments.place_of(token)
    told = ", ".join(f"{float(stream[token]):g} by the {model}" for model, stream in log_probs.items())
    causes = [model for model, stream in log_probs.items() if not bool(stream[token].isfinite())]
    raise NotFiniteError(
        f"the KL of sample {row} of this batch: {float(kl[token]):g} at its response token {position}, whose log-prob "
        f"is {told}, is not finite, so it cannot be subtracted from a reward; check the "
        f"{' and the '.join(causes or log_probs)} that scored this sample",
        row,
    )
