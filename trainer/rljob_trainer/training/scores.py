"""Scores of a batch's episodes as arrays, by reward function and of greedy responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from rljob_trainer.episodes.episode import Group, RewardResult
from rljob_trainer.training.batch import TrainingBatch


def greedy_scores(groups: Sequence[Group]) -> torch.Tensor | None:
    """``[E]``: the greedy score of each episode's prompt; None when the job does not sample greedy responses."""
    if any(group.greedy_score is None for group in groups):
        return None
    return torch.tensor([group.greedy_score for group in groups for _ in group.episodes], dtype=torch.float32)


def part_scores(rewards: Sequence[RewardResult]) -> dict[str, npt.NDArray[np.float32]]:
    """What each reward function gave, unweighted, ``[E]`` by name; NaN where a function was not asked."""
    names = sorted({name for reward in rewards for name in reward.parts})
    return {name: np.array([reward.parts.get(name, np.nan) for reward in rewards], dtype=np.float32) for name in names}


def part_matrix(batch: TrainingBatch, names: Iterable[str]) -> torch.Tensor:
    """``[E, K]``: the named reward functions' scores as a tensor, 0 where a function was not asked."""
    rewards = [episode.reward for episode in batch.episodes if episode.reward is not None]
    rows = [[reward.parts.get(name, 0.0) for name in names] for reward in rewards]
    return torch.tensor(rows, dtype=torch.float32)
