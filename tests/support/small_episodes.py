"""What tests of requests and responses share: names, small episodes, and whether tokens are the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rljob_trainer.episodes.episode import Episode, FinishReason, Prompt, RewardResult, single_turn
from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.receipts import Receipt
from rljob_trainer.episodes.tokens import FloatArray, IntArray, Tokens


def named(name: str) -> EpisodeId:
    """An identity that tests tell from others by its ``purpose``."""
    return EpisodeId(name, 0, 0)


def same_tokens(one: Tokens, other: Tokens) -> bool:
    """Every stream, with its type."""
    ours, theirs = one.streams(), other.streams()
    return ours.keys() == theirs.keys() and all(
        stream.dtype == theirs[name].dtype and np.array_equal(stream, theirs[name]) for name, stream in ours.items()
    )


def an_episode(
    prompt: Prompt,
    sample: int,
    versions: Sequence[int] | IntArray,
    *,
    ids: Sequence[int] | IntArray | None = None,
    log_probs: FloatArray | None = None,
    finish: FinishReason = "stop",
    text: str = "",
    reward: RewardResult | None = None,
    receipt: Receipt | None = None,
) -> Episode:
    """One turn of a token for each of ``versions``; every array may be written."""
    made = np.array(versions, np.int32)
    tokens = Tokens(
        np.zeros(len(made), np.int32) if ids is None else np.array(ids, np.int32),
        np.full(len(made), -1, np.float32) if log_probs is None else np.array(log_probs, np.float32),
        made,
        np.ones(len(made), np.bool_),
    )
    id = EpisodeId(TRAINING, prompt.ordinal, sample)
    return single_turn(id, prompt.token_ids, tokens, finish, receipt=receipt, text=text, reward=reward)
