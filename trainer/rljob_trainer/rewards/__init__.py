"""Reward functions: built-in rules, the user's own, and the processes that call them under a time limit."""

from rljob_trainer.rewards.rules import RewardVerdict
from rljob_trainer.rewards.terms import Response

__all__ = ["Response", "RewardVerdict"]
