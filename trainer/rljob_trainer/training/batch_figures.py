"""The metrics of a batch that was trained on."""

from __future__ import annotations

import numpy as np
import torch

from rljob_trainer.telemetry.batch_metrics import BatchStreams, PlayedTurns, batch_metrics
from rljob_trainer.training.batch import TrainingBatch
from rljob_trainer.training.scores import part_scores


def batch_figures(
    batch: TrainingBatch, penalised: torch.Tensor | None, version: int, max_prompt_tokens: int | None
) -> dict[str, float]:
    """What ``telemetry`` makes of a batch with all its streams. ``penalised [E]``: rewards less the KL, with a KL in
    the reward; ``version``: the trainer's."""
    sequences = batch.sequences
    rewards = [episode.reward for episode in batch.episodes if episode.reward is not None]
    return batch_metrics(
        BatchStreams(
            prompt_lengths=np.array([len(episode.leaves[0].prompt_ids) for episode in batch.episodes]),
            offsets=batch.episode_offsets,
            mask=sequences.mask,
            scores=batch.scores,
            groups=batch.groups,
            finish=[episode.finish for episode in batch.episodes],
            penalised=None if penalised is None else penalised.numpy(),
            parts=part_scores(rewards),
            sources=batch.sources,
            correct=[reward.correct for reward in rewards],
            errors=sum(reward.error is not None for reward in rewards),
            advantages=sequences.advantages,
            returns=sequences.returns,
            values=sequences.values,
            old_log_probs=sequences.old_log_probs,
            ref_log_probs=sequences.ref_log_probs,
            versions=batch.versions,
            trainer_version=version,
            seconds=np.array([episode.seconds for episode in batch.episodes]),
            max_prompt_tokens=max_prompt_tokens,
            leaf_offsets=batch.offsets,
            played=_played(batch),
        )
    )


def _played(batch: TrainingBatch) -> PlayedTurns | None:
    """None where no program has played the episodes."""
    if all(episode.made_for is None for episode in batch.episodes):
        return None
    turns = [turn for episode in batch.episodes for leaf in episode.leaves for turn in leaf.turns]
    return PlayedTurns(
        answers=np.array([episode.answers for episode in batch.episodes]),
        answer_tokens=np.array([turn.stop - turn.start for turn in turns]),
        calls=np.array([episode.world_calls for episode in batch.episodes]),
        call_seconds=np.array([episode.world_seconds for episode in batch.episodes]),
    )
