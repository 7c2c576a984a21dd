"""A reward model as those are told of it who compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rljob_api.spec.reward_model import RewardModelSpec
    from rljob_trainer.models.fixed import FixedModel


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Which model, and how it is computed."""

    name: str
    """Of the term of the reward."""
    spec: RewardModelSpec
    files: FixedModel
