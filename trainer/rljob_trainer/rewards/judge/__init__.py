"""Rewards that another language model gives, over an OpenAI-compatible endpoint: ``type: judge``. docs/rewards.md."""

from rljob_trainer.rewards.judge.judge import Judge

__all__ = ["Judge"]
