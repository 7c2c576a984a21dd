"""Scored groups laid out as the flat arrays that algorithms and the learner work on.

Sequences keep the order of groups and, inside a group, of samples. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_trainer.errors import DataError
from rljob_trainer.learner.protocol import Int64Array, SequenceBatch
from rljob_trainer.samples import BoolArray, FloatArray, Group, IntArray, Sample


@dataclass(slots=True)
class TrainingBatch:
    """The sequences of a batch and what is known of each; S sequences, N groups."""

    sequences: SequenceBatch
    offsets: Int64Array  # [S + 1] of the response streams
    groups: Int64Array  # [S] index of the sequence's group, 0 .. N - 1
    scores: FloatArray  # [S]
    truncated: BoolArray  # [S] ended for want of room
    versions: IntArray  # [tokens]
    sources: list[str]  # [S] data source of the prompt
    samples: list[Sample]  # [S]

    def __len__(self) -> int:
        return len(self.scores)


def layout(groups: Sequence[Group]) -> TrainingBatch:
    """Raises ``DataError`` naming the prompt when a sample has no reward."""
    samples = [sample for group in groups for sample in group.samples]
    prompts = [group.prompt for group in groups for _ in group.samples]
    for prompt, sample in zip(prompts, samples, strict=True):
        if sample.reward is None:
            raise DataError(f"sample {sample.index} of prompt {prompt.ordinal} reached training without a reward")
    pieces: list[npt.NDArray[np.int32]] = []
    for group in groups:
        prompt_ids = np.asarray(group.prompt.token_ids, dtype=np.int32)
        for sample in group.samples:
            pieces += (prompt_ids, sample.token_ids)
    response_lengths = np.array([len(s.token_ids) for s in samples], dtype=np.int64)
    sequences = SequenceBatch(
        token_ids=np.concatenate(pieces),
        prompt_lengths=np.array([len(p.token_ids) for p in prompts], dtype=np.int64),
        response_lengths=response_lengths,
        mask=np.concatenate([s.mask for s in samples]),
        rollout_log_probs=np.concatenate([s.log_probs for s in samples]),
    )
    return TrainingBatch(
        sequences=sequences,
        offsets=np.concatenate([[0], np.cumsum(response_lengths)]),
        groups=np.repeat(np.arange(len(groups)), [len(g.samples) for g in groups]),
        scores=np.array([s.reward.score for s in samples if s.reward], dtype=np.float32),
        truncated=np.array([s.finish == "length" for s in samples]),
        versions=np.concatenate([s.versions for s in samples]),
        sources=[p.source for p in prompts],
        samples=samples,
    )
