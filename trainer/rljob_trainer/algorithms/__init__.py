"""The mathematics: pure functions of flat token streams, registered by name. No I/O, no Ray, no processes.

    advantages("grpo", AdvantageInputs(...), normalize_by_std=False)      the driver, once a batch
    kl_penalised_rewards(...), AdaptiveKl(...)                            before it, with a KL in the reward
    actor_loss(PolicyInputs(...), settings, counts)                       the learner, for every micro-batch
    critic_loss(...)
    correct(old, rollout, mask, segments, Correction(Weights("token", 2.0)))   off-policy weights, mask, diagnostics

A method's file is named for its family; `registry` says how to add one.
"""

from rljob_trainer.algorithms import (  # noqa: F401  (these register themselves)
    clipped_losses,
    covariance_losses,
    gae,
    gradient_losses,
    group_advantages,
    return_advantages,
    sequence_losses,
    smooth_losses,
    token_baselines,
)
from rljob_trainer.algorithms.aggregation import LossCounts, aggregate, aggregations
from rljob_trainer.algorithms.controllers import AdaptiveKl, EntropyTarget, FixedKl, KlController
from rljob_trainer.algorithms.correction import (
    Corrected,
    Correction,
    correct,
    interpolated_log_probs,
    rollout_share,
)
from rljob_trainer.algorithms.estimators import AdvantageInputs, AdvantageOutput, advantage_estimators, advantages
from rljob_trainer.algorithms.gradient_noise import gradient_noise
from rljob_trainer.algorithms.kl import kl_estimators, kl_penalised_rewards
from rljob_trainer.algorithms.losses import ActorLossSettings, Loss, actor_loss, critic_loss
from rljob_trainer.algorithms.mismatch import PolicyDistance, agreement_metrics, most_apart, policy_distance
from rljob_trainer.algorithms.policy_losses import PolicyInputs, PolicyLossOutput, policy_losses
from rljob_trainer.algorithms.rejection import Rejection, veto
from rljob_trainer.algorithms.segments import NotFiniteError, Segments, UnfitRewardError, masked_mean, whiten
from rljob_trainer.algorithms.selection import (
    clipped_scores,
    normalised_scores,
    resampled,
    without_truncated,
)
from rljob_trainer.algorithms.turn_rewards import earned_at_turns
from rljob_trainer.algorithms.vocabulary_kl import chunked_kl, exact_kl
from rljob_trainer.algorithms.weights import Weights

__all__ = [
    "ActorLossSettings",
    "AdaptiveKl",
    "AdvantageInputs",
    "AdvantageOutput",
    "Corrected",
    "Correction",
    "EntropyTarget",
    "FixedKl",
    "KlController",
    "Loss",
    "LossCounts",
    "NotFiniteError",
    "PolicyDistance",
    "PolicyInputs",
    "PolicyLossOutput",
    "Rejection",
    "Segments",
    "UnfitRewardError",
    "Weights",
    "actor_loss",
    "advantage_estimators",
    "advantages",
    "aggregate",
    "aggregations",
    "agreement_metrics",
    "chunked_kl",
    "clipped_scores",
    "correct",
    "critic_loss",
    "earned_at_turns",
    "exact_kl",
    "gradient_noise",
    "interpolated_log_probs",
    "kl_estimators",
    "kl_penalised_rewards",
    "masked_mean",
    "most_apart",
    "normalised_scores",
    "policy_distance",
    "policy_losses",
    "resampled",
    "rollout_share",
    "veto",
    "whiten",
    "without_truncated",
]
