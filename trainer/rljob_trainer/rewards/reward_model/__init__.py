"""Rewards that a model with a head gives (Hugging Face sequence classification): ``type: rewardModel``."""

from rljob_trainer.rewards.reward_model.reward_model import RewardModel

__all__ = ["RewardModel"]
