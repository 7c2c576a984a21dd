"""Scores of a batch's episodes as arrays, by reward function and of greedy responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from rljob_trainer.episodes.episode import Group, RewardResult
from rljob_trainer.training.batch import TrainingBatch

MOST_DETAILS = 128
"""Metrics that a step has of functions' further numbers."""


def greedy_scores(groups: Sequence[Group]) -> torch.Tensor | None:
    """``[E]``: the greedy score of each episode's prompt; None when the job does not sample greedy responses."""
    if any(group.greedy_score is None for group in groups):
        return None
    return torch.tensor([group.greedy_score for group in groups for _ in group.episodes], dtype=torch.float32)


def turn_rewards(batch: TrainingBatch) -> torch.Tensor | None:
    """``[tokens]``: what of its episode's score each answer has earned, at the last trained token up to the answer's
    end, so that nothing after the answer sees it; None where nobody says anything of single answers. Where no such
    token is, or the answer has none, it is earned at the episode's end, like all the rest."""
    if not any(episode.reward is not None and episode.reward.turns for episode in batch.episodes):
        return None
    earned = np.zeros(int(batch.offsets[-1]), dtype=np.float32)
    offsets = batch.episode_offsets.tolist()
    for episode, (begin, stop) in zip(batch.episodes, pairwise(offsets), strict=True):
        if episode.reward is not None and episode.reward.turns:
            trained = np.flatnonzero(batch.sequences.mask[begin:stop])
            for end, amount in zip(episode.answer_ends(), episode.reward.turns, strict=False):
                if end is not None and (up_to := int(np.searchsorted(trained, end, side="right"))):
                    earned[begin + trained[up_to - 1]] += amount
    return torch.from_numpy(earned)


def slope(before: torch.Tensor, after: torch.Tensor) -> float:
    """By what differences of scores ``[E]`` were multiplied; 0 where there are none."""
    if not before.numel():
        return 0.0
    low, high = int(before.argmin()), int(before.argmax())
    apart = float(before[high].double() - before[low].double())
    return float(after[high].double() - after[low].double()) / apart if apart else 0.0


def part_scores(rewards: Sequence[RewardResult]) -> dict[str, npt.NDArray[np.float32]]:
    """What each reward function gave, unweighted, and its further numbers, ``[E]`` by name; NaN where there is none."""
    known = [{**reward.details, **reward.parts} for reward in rewards]
    # Functions may name their numbers as they like, in every sample otherwise.
    names = sorted({name for reward in rewards for name in reward.parts})
    names += sorted({name for reward in rewards for name in reward.details} - set(names))[:MOST_DETAILS]
    return {name: np.array([one.get(name, np.nan) for one in known], dtype=np.float32) for name in names}


def part_matrix(batch: TrainingBatch, names: Iterable[str]) -> torch.Tensor:
    """``[E, K]``: the named reward functions' scores as a tensor, 0 where a function was not asked."""
    rewards = [episode.reward for episode in batch.episodes if episode.reward is not None]
    rows = [[reward.parts.get(name, 0.0) for name in names] for reward in rewards]
    return torch.tensor(rows, dtype=torch.float32)
