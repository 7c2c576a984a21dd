"""From the scored groups of a validation set to its metrics, under their public names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rljob_trainer.episodes.episode import Group, RewardResult, is_cut
from rljob_trainer.telemetry.names import metric
from rljob_trainer.validation.statistics import (
    Float64Array,
    best_of,
    draw_sizes,
    majority_of,
    mean_and_std,
    pass_at,
    worst_of,
)


def summarise(source: str, groups: Sequence[Group], *, bootstrap: int = 1000, seed: int = 42) -> dict[str, float]:
    """The metrics of one validation set. Every sample carries its reward, every group equally many samples.

    The main number is correctness (1 or 0) where any sample's is known, else the score. In the first case a sample that
    nobody judged (it was cut, or its reward failed) is wrong, and the score is reported as the variable ``score``.
    Several reward functions are reported apart, each under its name.
    ``bootstrap`` is the number of draws behind maj@k.
    """
    rewards = [[_reward(source, group, index) for index in range(len(group.episodes))] for group in groups]
    if len({len(row) for row in rewards}) != 1:
        raise ValueError(f"validation set {source!r}: every prompt needs the same number of samples, and at least one")
    scores = np.array([[reward.score for reward in row] for row in rewards], dtype=np.float64)
    predictions = [[reward.prediction for reward in row] for row in rewards]
    judged = any(reward.correct is not None for row in rewards for reward in row)
    correct = np.array([[bool(reward.correct) for reward in row] for row in rewards])
    main = correct.astype(np.float64) if judged else scores

    prefix = "validation/<source>"
    metrics = _spread(prefix, main, source=source)
    for k in draw_sizes(scores.shape[1]):
        for choice, moments in (("best", best_of(main, k)), ("worst", worst_of(main, k))):
            metrics[metric(f"{prefix}/{choice}@<k>/mean", source=source, k=k)] = moments.mean
            metrics[metric(f"{prefix}/{choice}@<k>/std", source=source, k=k)] = moments.std
        if any(answer is not None for row in predictions for answer in row):
            moments = majority_of(main, predictions, k, draws=bootstrap, seed=seed)
            metrics[metric(f"{prefix}/maj@<k>/mean", source=source, k=k)] = moments.mean
            metrics[metric(f"{prefix}/maj@<k>/std", source=source, k=k)] = moments.std
    if judged:
        for k in (1, *draw_sizes(scores.shape[1])):
            metrics[metric(f"{prefix}/pass@<k>", source=source, k=k)] = pass_at(correct, k)
        metrics |= _spread(f"{prefix}/<variable>", scores, source=source, variable="score")
    for part in _shared_parts(rewards):
        values = np.array([[reward.parts[part] for reward in row] for row in rewards], dtype=np.float64)
        metrics |= _spread(f"{prefix}/<variable>", values, source=source, variable=part)
    shared = set.intersection(*(set(reward.details) for row in rewards for reward in row))
    for name in sorted(shared):
        values = np.array([[reward.details[name] for reward in row] for row in rewards], dtype=np.float64)
        metrics |= _spread(f"{prefix}/<variable>", values, source=source, variable=name)

    episodes = [episode for group in groups for episode in group.episodes]
    lengths = [episode.response_tokens for episode in episodes]
    cut = [is_cut(episode.finish) for episode in episodes]
    metrics[metric(f"{prefix}/response_length/mean", source=source)] = float(np.mean(lengths))
    metrics[metric(f"{prefix}/response_length/clip_ratio", source=source)] = float(np.mean(cut))
    metrics[metric(f"{prefix}/prompts", source=source)] = float(len(groups))
    return metrics


def _spread(prefix: str, values: Float64Array, **parts: str) -> dict[str, float]:
    moments = mean_and_std(values)
    n = values.shape[1]
    return {
        metric(f"{prefix}/mean@<n>", n=n, **parts): moments.mean,
        metric(f"{prefix}/std@<n>", n=n, **parts): moments.std,
    }


def _reward(source: str, group: Group, index: int) -> RewardResult:
    reward = group.episodes[index].reward
    if reward is None:
        raise ValueError(f"validation set {source!r}: sample {index} of prompt {group.prompt.ordinal} has no reward")
    return reward


def _shared_parts(rewards: Sequence[Sequence[RewardResult]]) -> list[str]:
    """The reward functions to report apart: those that judged every sample, where there are several."""
    every = [name for name in rewards[0][0].parts if all(name in reward.parts for row in rewards for reward in row)]
    return [name for name in every if name != "score"] if len(every) > 1 else []
