"""Which method takes which parameter, its default, and what it needs.

The functions themselves are in ``rljob_trainer.algorithms``, whose keyword-only parameters have the names used here
(a test holds both together). Validation must not import torch, hence this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rljob_api.spec.algorithm import Estimator, PolicyLossType

Value = float | int | bool | None


@dataclass(frozen=True)
class Method:
    """Parameters (snake_case) with the value each has when neither job nor preset gives one."""

    parameters: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class EstimatorMethod(Method):
    """What an advantage estimator needs besides rewards."""

    compares_samples: bool = False
    """Works with differences between samples of one prompt: samplesPerPrompt must be 2 or more."""
    needs_critic: bool = False


@dataclass(frozen=True)
class PolicyLossMethod(Method):
    """What a policy loss demands of the rest."""

    aggregation: str | None = None
    """The only aggregation with which the method is what its paper says; None: any."""
    needs_bypass: bool = False
    """The anchor of its ratio is the engine's log-probs."""


ESTIMATORS: Mapping[Estimator, EstimatorMethod] = {
    "gae": EstimatorMethod({"gamma": 1.0, "lambda_": 1.0, "whiten": True}, needs_critic=True),
    "grpo": EstimatorMethod({"normalize_by_std": True, "epsilon": 1e-6}, compares_samples=True),
    "grpo_passk": EstimatorMethod({"normalize_by_std": True, "epsilon": 1e-6}, compares_samples=True),
    "reinforce_plus_plus": EstimatorMethod({"gamma": 1.0, "whiten": True}),
    "reinforce_plus_plus_baseline": EstimatorMethod({"whiten": True}, compares_samples=True),
    "reinforce": EstimatorMethod({"gamma": 1.0, "whiten": False}),
    "rloo": EstimatorMethod(compares_samples=True),
    "remax": EstimatorMethod(),
    "opo": EstimatorMethod(compares_samples=True),
    "gpg": EstimatorMethod(compares_samples=True),
    "optimal_token_baseline": EstimatorMethod({"gamma": 1.0, "epsilon": 1e-8}, compares_samples=True),
    "tir_optimal_token_baseline": EstimatorMethod({"gamma": 1.0, "epsilon": 1e-8}, compares_samples=True),
    "gdpo": EstimatorMethod({"normalize_by_std": True, "epsilon": 1e-6, "whiten": True}, compares_samples=True),
    "maxrl": EstimatorMethod({"epsilon": 1e-6}, compares_samples=True),
}

_CLIP: Mapping[str, Value] = {"clip_low": 0.2, "clip_high": 0.2}

POLICY_LOSSES: Mapping[PolicyLossType, PolicyLossMethod] = {
    "ppoClip": PolicyLossMethod({**_CLIP, "dual_clip": None}),
    "gspo": PolicyLossMethod({"clip_low": 3e-4, "clip_high": 4e-4}, aggregation="seqMeanTokenMean"),
    "sapo": PolicyLossMethod({"tau_positive": 1.0, "tau_negative": 1.05}, aggregation="seqMeanTokenMean"),
    "gpg": PolicyLossMethod(),
    "clipCov": PolicyLossMethod(
        {**_CLIP, "dual_clip": None, "covariance_fraction": 2e-4, "covariance_low": 1.0, "covariance_high": 5.0}
    ),
    "klCov": PolicyLossMethod({"covariance_fraction": 2e-4, "kl_coefficient": 0.1}),
    "gmpo": PolicyLossMethod({"clip_low": 0.4, "clip_high": 0.4}, aggregation="seqMeanTokenMean"),
    "cispo": PolicyLossMethod({"clip_low": 1.0, "clip_high": 4.0}),
    "dppoTv": PolicyLossMethod({"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 20.0}),
    "dppoKl": PolicyLossMethod({"divergence_threshold": 0.05, "ratio_cap": 20.0}),
    "dro": PolicyLossMethod({"beta": 0.1}),
    "tis": PolicyLossMethod({"ratio_cap": 2.0}),
    "reinforce": PolicyLossMethod(),
    "bypassPpoClip": PolicyLossMethod({**_CLIP, "dual_clip": None}, needs_bypass=True),
    "bypassReinforce": PolicyLossMethod(needs_bypass=True),
}

ESTIMATOR_PARAMETERS = frozenset(name for method in ESTIMATORS.values() for name in method.parameters)
POLICY_LOSS_PARAMETERS = frozenset(name for method in POLICY_LOSSES.values() for name in method.parameters)
