"""Every method by name: its parameters with their defaults, and what it needs. Written by `make generate`.

The functions are in ``rljob_trainer.algorithms`` and ``rljob_trainer.rewards``, and so is what stands here: in their
decorators and keyword-only parameters. Validation must not import torch, hence this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rljob_api.method import EstimatorMethod, ParameterKind, PolicyLossMethod

Estimator = Literal[
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "maxrl",
    "opo",
    "optimal_token_baseline",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "tir_optimal_token_baseline",
]
PolicyLossType = Literal[
    "bypassPpoClip",
    "bypassReinforce",
    "cispo",
    "clipCov",
    "dppoKl",
    "dppoTv",
    "dro",
    "gmpo",
    "gpg",
    "gspo",
    "klCov",
    "ppoClip",
    "reinforce",
    "sapo",
    "tis",
]

ESTIMATORS: Mapping[Estimator, EstimatorMethod] = {
    "gae": EstimatorMethod(
        parameters={
            "gamma": 1.0,
            "lambda_": 1.0,
            "whiten": True,
            "whiten_rewards": False,
        },
        needs_critic=True,
    ),
    "gdpo": EstimatorMethod(
        parameters={
            "normalize_by_std": True,
            "epsilon": 1e-06,
            "whiten": True,
        },
        compares_samples=True,
    ),
    "gpg": EstimatorMethod(
        compares_samples=True,
    ),
    "grpo": EstimatorMethod(
        parameters={
            "normalize_by_std": True,
            "epsilon": 1e-06,
        },
        compares_samples=True,
    ),
    "grpo_passk": EstimatorMethod(
        parameters={
            "normalize_by_std": True,
            "epsilon": 1e-06,
        },
        compares_samples=True,
    ),
    "maxrl": EstimatorMethod(
        parameters={
            "epsilon": 1e-06,
        },
        compares_samples=True,
    ),
    "opo": EstimatorMethod(
        compares_samples=True,
    ),
    "optimal_token_baseline": EstimatorMethod(
        parameters={
            "gamma": 1.0,
            "epsilon": 1e-30,
        },
        compares_samples=True,
    ),
    "reinforce": EstimatorMethod(
        parameters={
            "gamma": 1.0,
            "whiten": False,
        },
    ),
    "reinforce_plus_plus": EstimatorMethod(
        parameters={
            "gamma": 1.0,
            "whiten": True,
        },
    ),
    "reinforce_plus_plus_baseline": EstimatorMethod(
        parameters={
            "whiten": True,
        },
        compares_samples=True,
    ),
    "remax": EstimatorMethod(),
    "rloo": EstimatorMethod(
        compares_samples=True,
    ),
    "tir_optimal_token_baseline": EstimatorMethod(
        parameters={
            "gamma": 1.0,
            "epsilon": 1e-30,
        },
        compares_samples=True,
    ),
}

POLICY_LOSSES: Mapping[PolicyLossType, PolicyLossMethod] = {
    "bypassPpoClip": PolicyLossMethod(
        parameters={
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip": None,
        },
        needs_bypass=True,
    ),
    "bypassReinforce": PolicyLossMethod(
        needs_bypass=True,
    ),
    "cispo": PolicyLossMethod(
        parameters={
            "clip_low": 1.0,
            "clip_high": 4.0,
        },
    ),
    "clipCov": PolicyLossMethod(
        parameters={
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip": None,
            "covariance_fraction": 0.0002,
            "covariance_low": 1.0,
            "covariance_high": 5.0,
            "exclude_clipped": True,
        },
    ),
    "dppoKl": PolicyLossMethod(
        parameters={
            "divergence_low": 0.05,
            "divergence_high": 0.05,
            "ratio_cap": 20.0,
        },
    ),
    "dppoTv": PolicyLossMethod(
        parameters={
            "clip_low": 0.2,
            "clip_high": 0.2,
            "ratio_cap": 20.0,
        },
    ),
    "dro": PolicyLossMethod(
        parameters={
            "beta": 0.1,
        },
    ),
    "gmpo": PolicyLossMethod(
        parameters={
            "clip_low": 0.4,
            "clip_high": 0.4,
        },
        aggregation="seqMeanTokenMean",
    ),
    "gpg": PolicyLossMethod(),
    "gspo": PolicyLossMethod(
        parameters={
            "clip_low": 0.0003,
            "clip_high": 0.0004,
        },
        aggregation="seqMeanTokenMean",
    ),
    "klCov": PolicyLossMethod(
        parameters={
            "covariance_fraction": 0.0002,
            "kl_coefficient": 0.1,
        },
    ),
    "ppoClip": PolicyLossMethod(
        parameters={
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip": None,
        },
    ),
    "reinforce": PolicyLossMethod(),
    "sapo": PolicyLossMethod(
        parameters={
            "tau_positive": 1.0,
            "tau_negative": 1.05,
        },
        aggregation="seqMeanTokenMean",
    ),
    "tis": PolicyLossMethod(
        parameters={
            "ratio_cap": 2.0,
        },
    ),
}

ESTIMATOR_PARAMETERS = frozenset(name for method in ESTIMATORS.values() for name in method.parameters)
POLICY_LOSS_PARAMETERS = frozenset(name for method in POLICY_LOSSES.values() for name in method.parameters)
REWARD_PARAMETERS: Mapping[str, Mapping[str, ParameterKind]] = {
    "codeTests": {
        "score": ("all", "fraction"),
        "seconds": "number",
        "mostTests": "integer",
        "prelude": "boolean",
        "tolerance": "number",
        "prefix": "text",
    },
    "environment": {},
    "exactMatch": {
        "ignoreCase": "boolean",
        "partial": "boolean",
    },
    "gsm8k": {
        "method": ("strict", "flexible"),
        "formatScore": "number",
    },
    "jsonSchema": {
        "schema": "object",
        "schemaColumn": "text",
    },
    "length": {
        "coefficient": "number",
        "freeTokens": "integer",
    },
    "math": {
        "boxedOnly": "boolean",
    },
    "multipleChoice": {
        "options": "integer",
        "method": ("strict", "flexible"),
        "answerIs": ("letter", "index"),
    },
    "pattern": {
        "full": "boolean",
        "ignoreCase": "boolean",
    },
    "reasoningGym": {
        "answerIn": ("tags", "response"),
        "tag": "text",
        "seconds": "number",
    },
}
"""By the type of a function, as its ``params`` are named in a job; ``custom`` is free."""
