"""Scored groups laid out as the flat arrays that algorithms and the learner work on.

Sequences keep the order of groups, inside a group of episodes, and inside an episode of leaves. Nothing is computed
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rljob_trainer.episodes.episode import Episode, Group
from rljob_trainer.episodes.tokens import BoolArray, FloatArray, IntArray, Tokens
from rljob_trainer.errors import DataError
from rljob_trainer.learner.protocol import Int64Array, SequenceBatch


@dataclass(slots=True)
class TrainingBatch:
    """The sequences of a batch and what is known of each: S sequences of E episodes in N groups."""

    sequences: SequenceBatch
    offsets: Int64Array  # [S + 1] of the response streams
    groups: Int64Array  # [S] index of the sequence's group, 0 .. N - 1
    scores: FloatArray  # [S] of the sequence's episode
    truncated: BoolArray  # [S] ended for want of room
    versions: IntArray  # [tokens]
    sources: list[str]  # [S] data source of the prompt
    episodes: list[Episode]  # [S] the one that the sequence is a leaf of

    def __len__(self) -> int:
        return len(self.scores)


def layout(groups: Sequence[Group]) -> TrainingBatch:
    """Every leaf becomes a sequence. Raises ``DataError`` naming the episode that has no reward."""
    owners = [(number, group.prompt, episode) for number, group in enumerate(groups) for episode in group.episodes]
    for _, _, episode in owners:
        if episode.reward is None:
            raise DataError(f"{episode.id} reached training without a reward")
    rows = [(number, prompt, episode, leaf) for number, prompt, episode in owners for leaf in episode.leaves]
    leaves = [leaf for _, _, _, leaf in rows]
    tokens = Tokens.joined([leaf.tokens for leaf in leaves])
    pieces: list[IntArray] = []
    for leaf in leaves:
        pieces += (np.asarray(leaf.prompt_ids, dtype=np.int32), leaf.tokens.ids)
    response_lengths = np.array([len(leaf.tokens) for leaf in leaves], dtype=np.int64)
    sequences = SequenceBatch(
        token_ids=np.concatenate(pieces),
        prompt_lengths=np.array([len(leaf.prompt_ids) for leaf in leaves], dtype=np.int64),
        response_lengths=response_lengths,
        mask=tokens.mask.copy(),
        rollout_log_probs=tokens.log_probs,
    )
    return TrainingBatch(
        sequences=sequences,
        offsets=np.concatenate([[0], np.cumsum(response_lengths)]),
        groups=np.array([number for number, _, _, _ in rows], dtype=np.int64),
        scores=np.array([episode.reward.score for _, _, episode, _ in rows if episode.reward], dtype=np.float32),
        truncated=np.array([episode.finish == "length" for _, _, episode, _ in rows]),
        versions=tokens.versions.copy(),
        sources=[prompt.source for _, prompt, _, _ in rows],
        episodes=[episode for _, _, episode, _ in rows],
    )
