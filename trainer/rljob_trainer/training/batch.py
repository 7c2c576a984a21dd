"""Scored groups laid out as the flat arrays that algorithms and the learner work on.

Sequences keep the order of groups, inside a group of episodes, and inside an episode of leaves. Nothing is computed
here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rljob_trainer.algorithms import Segments
from rljob_trainer.episodes.episode import Episode, Group, Leaf, is_cut
from rljob_trainer.episodes.tokens import BoolArray, ByteArray, FloatArray, IntArray, Tokens
from rljob_trainer.errors import DataError
from rljob_trainer.learner.prefixes import offsets_of
from rljob_trainer.learner.protocol import Int64Array, SequenceBatch


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The sequences of a batch and what is known of them: S sequences, the leaves of E episodes, in N groups.

    The leaves of an episode stand side by side, in the order in which they were made: all its response tokens are one
    stretch of the streams.
    """

    sequences: SequenceBatch
    offsets: Int64Array  # [S + 1] of the response streams
    episode_of: Int64Array  # [S] index of the sequence's episode, 0 .. E - 1
    versions: IntArray  # [tokens]
    episodes: list[Episode]  # [E]
    episode_offsets: Int64Array  # [E + 1] of the response streams
    groups: Int64Array  # [E] index of the episode's group, 0 .. N - 1
    scores: FloatArray  # [E]
    truncated: BoolArray  # [E] ended for want of room
    sources: list[str]  # [E] data source of the prompt, as metrics name it

    def __len__(self) -> int:
        """Episodes."""
        return len(self.episodes)

    @property
    def last_leaf(self) -> Int64Array:
        """``[E]`` the index of each episode's last sequence."""
        return np.searchsorted(self.episode_of, np.arange(len(self)), side="right") - 1

    @property
    def segments(self) -> Segments:
        """Where each sequence's response tokens are in the streams."""
        return Segments.from_lengths(torch.from_numpy(self.sequences.response_lengths))

    @property
    def episode_segments(self) -> Segments:
        """Where each episode's response tokens are in the streams."""
        return Segments.from_lengths(torch.from_numpy(np.diff(self.episode_offsets)))

    def of(self, sequences: SequenceBatch) -> TrainingBatch:
        """The batch with ``sequences`` in place of its own, which are the same but for some streams."""
        return replace(self, sequences=sequences)

    def owner(self, sequence: int) -> Episode:
        """The episode that a sequence is a leaf of."""
        return self.episodes[int(self.episode_of[sequence])]

    def shares(self, *, of_prompts: bool = False) -> FloatArray | None:
        """``[tokens]`` what part of its episode each token's sequence is: one over the leaves of the episode that are
        trained on. None where every episode has one.

        ``of_prompts``: what part of the tokens of its group that are trained on are the sequence's own.
        """
        if not of_prompts and len(self.episodes) == len(self.episode_of):
            return None
        running = np.concatenate([[0], np.cumsum(self.sequences.mask)])
        own = running[self.offsets[1:]] - running[self.offsets[:-1]]
        whole = self.groups[self.episode_of] if of_prompts else self.episode_of
        part = own if of_prompts else own > 0
        shares = part / np.maximum(np.bincount(whole, weights=part), 1)[whole]
        return np.repeat(shares, np.diff(self.offsets)).astype(np.float32)


def layout(groups: Sequence[Group]) -> TrainingBatch:
    """Every leaf becomes a sequence. Raises ``DataError`` naming the episode that has no reward."""
    episodes = [episode for group in groups for episode in group.episodes]
    for episode in episodes:
        if episode.reward is None:
            raise DataError(f"{episode.id} reached training without a reward")
    leaves = [leaf for episode in episodes for leaf in episode.leaves]
    tokens = Tokens.joined([leaf.tokens for leaf in leaves])
    prompts = {id(leaf.prompt_ids): leaf.prompt_ids for leaf in leaves}  # siblings share it
    arrays = {key: np.frombuffer(array("i", prompt), np.int32) for key, prompt in prompts.items()}
    pieces: list[IntArray] = []
    for leaf in leaves:
        pieces += (arrays[id(leaf.prompt_ids)], leaf.tokens.ids)
    response_lengths = np.array([len(leaf.tokens) for leaf in leaves], dtype=np.int64)
    sequences = SequenceBatch(
        token_ids=np.concatenate(pieces),
        prompt_lengths=np.array([len(leaf.prompt_ids) for leaf in leaves], dtype=np.int64),
        response_lengths=response_lengths,
        mask=tokens.mask.copy(),
        rollout_log_probs=tokens.log_probs,
        routed_experts=None if tokens.routed_experts is None else _experts(leaves),
    )
    return TrainingBatch(
        sequences=sequences,
        offsets=offsets_of(response_lengths),
        episode_of=np.repeat(np.arange(len(episodes)), [len(episode.leaves) for episode in episodes]),
        versions=tokens.versions.copy(),
        episodes=episodes,
        episode_offsets=offsets_of(np.array([episode.response_tokens for episode in episodes], dtype=np.int64)),
        groups=np.repeat(np.arange(len(groups)), [len(group.episodes) for group in groups]),
        scores=np.array([episode.reward.score for episode in episodes if episode.reward], dtype=np.float32),
        truncated=np.array([is_cut(episode.finish) for episode in episodes]),
        sources=[group.prompt.counted_as or group.prompt.source for group in groups for _ in group.episodes],
    )


def _experts(leaves: Sequence[Leaf]) -> ByteArray:
    """``[all, layers, k]`` the experts of the passes over each token: those of a response's token stand with the one
    that it predicted, and nothing is known of its last."""
    parts: list[ByteArray] = []
    for leaf in leaves:
        routed, of_prompt = leaf.tokens.routed_experts, leaf.tokens.prompt_experts
        assert routed is not None
        if of_prompt is None:
            of_prompt = np.zeros((len(leaf.prompt_ids) - 1, *routed.shape[1:]), np.uint8)
        parts += [of_prompt, routed, np.zeros((1, *routed.shape[1:]), np.uint8)]
    return np.concatenate(parts)
