"""What the driver sends to a rank and what comes back: its share of the sequences, cut into micro-batches.

Cutting and putting together happen on the driver (``group.py``), in numpy; a rank only ever sees its own share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rljob_trainer.algorithms.aggregation import LossCounts
from rljob_trainer.learner.packing import Lengths, check_batch, offsets_of, plan, ranges, take
from rljob_trainer.learner.protocol import Int64Array, SequenceBatch
from rljob_trainer.samples import FloatArray


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a call."""

    batch: SequenceBatch
    """The sequences that this rank needs, each once."""
    lengths: Lengths
    micro_batches: list[list[Int64Array]]
    """``[mini-batch][micro-batch]`` indices into ``batch``; an empty one only takes part in collectives."""
    counts: list[LossCounts]
    """``[mini-batch]`` over all ranks."""


@dataclass(slots=True)
class StepReport:
    """One optimizer step on one rank. ``sums`` are shares that add up over ranks; the rest is equal on all of them."""

    model: str
    mini_batch: int
    grad_norm: float
    sums: dict[str, float]
    problem: str | None = None


@dataclass(slots=True)
class RankReport:
    """What a rank tells after an update."""

    steps: list[StepReport]
    rates: dict[str, float] = field(default_factory=dict)
    """Learning rate by model."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A call's shares, and where each rank's sequences stand in the whole batch."""

    shares: list[Share]
    indices: list[Int64Array]
    """``[rank]`` indices of the share's sequences in the batch."""
    rank_tokens: list[int]
    """``[rank]`` row tokens over all mini-batches."""

    def merge(self, batch: SequenceBatch, parts: Sequence[FloatArray], *, per_sequence: bool = False) -> FloatArray:
        """Puts the ranks' streams (in the order of their micro-batches) back into the order of ``batch``."""
        lengths = np.ones(len(batch), dtype=np.int64) if per_sequence else batch.response_lengths
        offsets = offsets_of(lengths)
        result = np.zeros(int(offsets[-1]), dtype=np.float32)
        for share, indices, part in zip(self.shares, self.indices, parts, strict=True):
            done = indices[np.concatenate([m for mini in share.micro_batches for m in mini])]
            result[ranges(offsets[done], lengths[done])] = part
        return result


def cut(
    batch: SequenceBatch,
    mini_batches: Sequence[Sequence[int]],
    *,
    ranks: int,
    token_budget: int,
    share_prompts: bool = True,
) -> Cut:
    """Plans a call. Raises ``ValueError`` for a malformed batch or an index out of range."""
    check_batch(batch)
    for number, mini_batch in enumerate(mini_batches):
        if len(mini_batch) and (min(mini_batch) < 0 or max(mini_batch) >= len(batch)):
            raise ValueError(f"mini-batch {number} names sequences outside 0 .. {len(batch) - 1}")
    lengths = Lengths.of(batch)
    if not share_prompts:
        lengths = Lengths(lengths.prompts, lengths.responses, np.arange(len(batch)))
    counts = _counts(batch, mini_batches)
    everything = plan(lengths, mini_batches, ranks, token_budget)
    shares, needed = [], []
    for micro_batches in everything:
        parts = [m for mini in micro_batches for m in mini]
        indices = np.unique(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)
        if len(indices) == len(batch):
            own = batch
        else:
            own = take(batch, indices)
            micro_batches = [[np.searchsorted(indices, m) for m in mini] for mini in micro_batches]
        own_lengths = Lengths(lengths.prompts[indices], lengths.responses[indices], lengths.keys[indices])
        shares.append(Share(own, own_lengths, micro_batches, counts))
        needed.append(indices)
    tokens = [
        sum(share.lengths.row_tokens(m) for mini in share.micro_batches for m in mini if len(m)) for share in shares
    ]
    return Cut(shares, needed, tokens)


def _counts(batch: SequenceBatch, mini_batches: Sequence[Sequence[int]]) -> list[LossCounts]:
    """Masked tokens, and sequences that have any, of each mini-batch."""
    running = np.concatenate([[0], np.cumsum(batch.mask)])
    offsets = offsets_of(batch.response_lengths)
    per_sequence = running[offsets[1:]] - running[offsets[:-1]]
    result = []
    for mini_batch in mini_batches:
        tokens = per_sequence[np.asarray(mini_batch, dtype=np.int64)]
        result.append(LossCounts(int(tokens.sum()), int((tokens > 0).sum())))
    return result
