"""Data sets, generated tasks, chat templates, and the order of prompts, which resumes exactly."""

from rljob_trainer.data.build import training_feed, validation_sets
from rljob_trainer.data.feed import PromptFeed, Source, validation_prompts

__all__ = ["PromptFeed", "Source", "training_feed", "validation_prompts", "validation_sets"]
