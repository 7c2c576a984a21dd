"""The mathematics: pure functions of flat token streams, registered by name. No I/O, no Ray, no processes.

    advantages("grpo", AdvantageInputs(...), normalize_by_std=False)      the driver, once a batch
    kl_penalised_rewards(...), AdaptiveKl(...)                            before it, with a KL in the reward
    actor_loss(PolicyInputs(...), settings, counts)                       the learner, for every micro-batch
    critic_loss(...)

A method's file is named for its family; `registry` says how to add one.
"""

from rljob_trainer.algorithms import clipped_losses, gae, group_advantages  # noqa: F401  (these register themselves)
from rljob_trainer.algorithms.aggregation import LossCounts, aggregate, aggregations
from rljob_trainer.algorithms.controllers import AdaptiveKl, EntropyTarget, FixedKl, KlController
from rljob_trainer.algorithms.estimators import AdvantageInputs, AdvantageOutput, advantage_estimators, advantages
from rljob_trainer.algorithms.kl import kl_estimators, kl_penalised_rewards
from rljob_trainer.algorithms.losses import Loss, LossSettings, actor_loss, critic_loss
from rljob_trainer.algorithms.policy_losses import PolicyInputs, PolicyLossOutput, policy_losses
from rljob_trainer.algorithms.segments import Segments, masked_mean, whiten

__all__ = [
    "AdaptiveKl",
    "AdvantageInputs",
    "AdvantageOutput",
    "EntropyTarget",
    "FixedKl",
    "KlController",
    "Loss",
    "LossCounts",
    "LossSettings",
    "PolicyInputs",
    "PolicyLossOutput",
    "Segments",
    "actor_loss",
    "advantage_estimators",
    "advantages",
    "aggregate",
    "aggregations",
    "critic_loss",
    "kl_estimators",
    "kl_penalised_rewards",
    "masked_mean",
    "policy_losses",
    "whiten",
]
