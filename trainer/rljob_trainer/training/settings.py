"""From the job's words to the settings of algorithms and learner. Holds no state and touches no batch."""

from __future__ import annotations

from typing import Any

from rljob_api.resolved import ResolvedAlgorithm, ResolvedRolloutCorrection
from rljob_api.spec.algorithm import CorrectionWeights
from rljob_api.spec.reward import Reward
from rljob_trainer.algorithms import (
    AdaptiveKl,
    Correction,
    EntropyTarget,
    FixedKl,
    KlController,
    Rejection,
    Weights,
    veto,
)
from rljob_trainer.learner.protocol import LossSettings


def loss_settings(algorithm: ResolvedAlgorithm, temperature: float) -> LossSettings:
    """The part of the job that the learner needs in order to turn streams into a loss."""
    in_loss = algorithm.kl.in_loss
    params: dict[str, Any] = {**algorithm.policy_loss.params, **_bypass_params(algorithm)}
    return LossSettings(
        policy_loss=algorithm.policy_loss.type,
        policy_loss_params=params,
        aggregation=algorithm.aggregation,
        aggregation_params=algorithm.aggregation_params,
        kl_kind=None if in_loss is None else in_loss.kind,
        kl_coefficient=0.0 if in_loss is None else in_loss.coefficient,
        entropy_coefficient=algorithm.entropy_coefficient,
        value_clip=None if algorithm.critic is None else algorithm.critic.value_clip,
        temperature=temperature,
        correction=correction_settings(algorithm.rollout_correction) if algorithm.interpolates else None,
    )


def _bypass_params(algorithm: ResolvedAlgorithm) -> dict[str, Any]:
    """In bypass mode the correction happens inside the loss: there is no third policy to correct against before it."""
    loss = algorithm.policy_loss.type
    if loss not in ("bypassPpoClip", "bypassReinforce"):
        return {}
    correction = correction_settings(algorithm.rollout_correction)
    params: dict[str, Any] = {"rejection": correction.rejection}
    if loss == "bypassReinforce":
        weights = correction.weights
        params["level"] = "none" if weights is None else weights.level
        if weights is not None:
            params |= {name: getattr(weights, name) for name in ("low", "high", "normalize", "clamp")}
    return params


def correction_settings(given: ResolvedRolloutCorrection) -> Correction:
    """Weights and rejection; a veto is one more rule."""
    weights = given.weights
    rules = [Rejection(rule.statistic, rule.over, rule.high, rule.low) for rule in given.rejection]
    if given.veto is not None:
        rules.append(veto(given.veto))
    return Correction(None if weights is None else Weights(**weights.model_dump()), tuple(rules))


def part_weights(reward: Reward) -> dict[str, float]:
    """The terms of a score by their names among a sample's parts; the punishment of long responses is one of them."""
    weights = {function.name or function.type: function.weight for function in reward.functions}
    return weights | ({"overlong": 1.0} if reward.overlong else {})


def with_correction(algorithm: ResolvedAlgorithm) -> ResolvedAlgorithm:
    """The algorithm with mode decoupled and importance weights: the job's own, or one a token, cut at 2."""
    given = algorithm.rollout_correction
    switched = given.model_copy(update={"mode": "decoupled", "weights": given.weights or CorrectionWeights()})
    return algorithm.model_copy(update={"rollout_correction": switched})


def kl_controller(algorithm: ResolvedAlgorithm) -> KlController:
    """The controller of the KL in the reward."""
    in_reward = algorithm.kl.in_reward
    if in_reward is None:
        return FixedKl(0.0)
    if in_reward.controller.type == "fixed":
        return FixedKl(in_reward.coefficient)
    return AdaptiveKl(in_reward.coefficient, in_reward.controller.target, in_reward.controller.horizon)


def entropy_controller(algorithm: ResolvedAlgorithm) -> EntropyTarget | None:
    """None: the coefficient stays as it is."""
    given = algorithm.entropy_target
    if given is None:
        return None
    start = min(algorithm.entropy_coefficient, given.maximum)
    return EntropyTarget(given.target, start, given.rate, maximum=given.maximum)


def steering_settings(algorithm: ResolvedAlgorithm) -> dict[str, Any]:
    """By their places in the job, as JSON has them: the settings by which a run changes coefficients and corrections of
    its own while it trains."""
    in_reward, target = algorithm.kl.in_reward, algorithm.entropy_target
    return {
        "algorithm.kl.inReward": None if in_reward is None else in_reward.model_dump(mode="json"),
        "algorithm.entropyTarget": None
        if target is None
        else {"start": algorithm.entropy_coefficient, **target.model_dump(mode="json")},
        "algorithm.rolloutCorrection": algorithm.rollout_correction.model_dump(mode="json"),
    }
