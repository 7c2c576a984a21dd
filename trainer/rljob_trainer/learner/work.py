"""What the driver sends to a rank and what comes back: its share of the sequences, cut into micro-batches.

Cutting and putting together happen on the driver (``group.py``), in numpy; a rank only ever sees its own share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rljob_trainer.algorithms.aggregation import LossCounts
from rljob_trainer.episodes.tokens import FloatArray
from rljob_trainer.learner.packing import Bins, Lengths, check_batch, offsets_of, plan, ranges, take
from rljob_trainer.learner.protocol import Int64Array, SequenceBatch
from rljob_trainer.learner.seals import Seals, of_sequences, seals_of
from rljob_trainer.learner.usage import Usage


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a call."""

    batch: SequenceBatch
    """The sequences that this rank needs, each once."""
    lengths: Lengths
    micro_batches: list[list[Int64Array]]
    """``[mini-batch][micro-batch]`` indices into ``batch``; an empty one only takes part in collectives."""
    places: list[list[Int64Array]]
    """The same shape: positions of those sequences in the mini-batch, over all ranks."""
    lengths_of_all: list[Int64Array]
    """``[mini-batch]`` response lengths of its sequences on all ranks, ``[S]``."""
    counts: list[LossCounts]
    """``[mini-batch]`` over all ranks."""
    seals: Seals = field(default_factory=dict)
    """Of ``batch``, as the driver had it."""


@dataclass(slots=True)
class StepReport:
    """One optimizer step on one rank. ``sums`` are shares that add up over ranks, and extremes (names in /max or /min);
    the rest is equal on all of them."""

    model: str
    mini_batch: int
    grad_norm: float
    sums: dict[str, float]
    problem: str | None = None


@dataclass(slots=True)
class RankScores:
    """What a rank tells after scoring: its streams by the names of ``ScoreResult``, and what they cost."""

    streams: dict[str, FloatArray]
    usage: Usage


@dataclass(slots=True)
class RankReport:
    """What a rank tells after an update."""

    steps: list[StepReport]
    rates: dict[str, float] = field(default_factory=dict)
    """Learning rate by model."""
    first_log_probs: FloatArray | None = None
    """[tokens] of the first mini-batch before its optimizer step, in the order of the share's micro-batches; None
    without an update of the actor."""
    usage: Usage = field(default_factory=Usage)
    notes: list[str] = field(default_factory=list)
    """What the run should say of this update."""

    def largest_norms(self) -> dict[str, float]:
        """Of the gradients of the optimizer steps that were taken, by model."""
        norms: dict[str, float] = {}
        for step in self.steps:
            if step.problem is None:
                norms[step.model] = max(norms.get(step.model, 0.0), step.grad_norm)
        return norms


@dataclass(frozen=True, slots=True)
class Cut:
    """A call's shares, and where each rank's sequences stand in the whole batch."""

    shares: list[Share]
    indices: list[Int64Array]
    """``[rank]`` indices of the share's sequences in the batch."""
    rank_tokens: list[int]
    """``[rank]`` row tokens over all mini-batches."""

    def merge(
        self, batch: SequenceBatch, parts: Sequence[FloatArray], *, per_sequence: bool = False, only: int | None = None
    ) -> FloatArray:
        """Puts the ranks' streams (in the order of their micro-batches) back into the order of ``batch``.

        With ``only`` the streams are those of one mini-batch; the other sequences get NaN.
        """
        lengths = np.ones(len(batch), dtype=np.int64) if per_sequence else batch.response_lengths
        offsets = offsets_of(lengths)
        result = np.full(int(offsets[-1]), 0.0 if only is None else np.nan, dtype=np.float32)
        for share, indices, part in zip(self.shares, self.indices, parts, strict=True):
            minis = share.micro_batches if only is None else share.micro_batches[only : only + 1]
            done = indices[np.concatenate([m for mini in minis for m in mini])]
            result[ranges(offsets[done], lengths[done])] = part
        return result


def cut(
    batch: SequenceBatch,
    mini_batches: Sequence[Sequence[int]],
    *,
    ranks: int,
    token_budget: int,
    share_prompts: bool = True,
    halved_from: int | None = None,
) -> Cut:
    """Plans a call. Mini-batches of ``halved_from`` row tokens and more become two micro-batches at least.

    Raises ``ValueError`` for a malformed batch or an index out of range.
    """
    check_batch(batch)
    seals = seals_of(batch)
    for number, mini_batch in enumerate(mini_batches):
        if len(mini_batch) and (min(mini_batch) < 0 or max(mini_batch) >= len(batch)):
            raise ValueError(f"mini-batch {number} names sequences outside 0 .. {len(batch) - 1}")
    lengths = Lengths.of(batch)
    if not share_prompts:
        lengths = Lengths(lengths.prompts, lengths.responses, np.arange(len(batch)))
    minis = [np.asarray(mini_batch, dtype=np.int64) for mini_batch in mini_batches]
    counts = _counts(batch, minis)
    # Planned by position: an index may stand in a mini-batch more than once.
    plans: dict[bytes, list[Bins]] = {}  # epochs often cut the batch alike
    for mini in minis:
        if (key := mini.tobytes()) not in plans:
            plans[key] = plan(lengths.take(mini), ranks, token_budget, halved_from)
    planned = [plans[mini.tobytes()] for mini in minis]
    shares, needed, tokens = [], [], []
    for rank in range(ranks):
        places = [micro_batches[rank] for micro_batches in planned]
        wanted = [[mini[place] for place in own] for mini, own in zip(minis, places, strict=True)]
        flat = [indices for own in wanted for indices in own]
        indices = np.unique(np.concatenate(flat)) if flat else np.empty(0, dtype=np.int64)
        tokens.append(sum(lengths.row_tokens(m) for m in flat if len(m)))
        part = batch
        if len(indices) != len(batch):
            part = take(batch, indices)
            wanted = [[np.searchsorted(indices, m) for m in own] for own in wanted]
        of_all = [lengths.responses[mini] for mini in minis]
        own = of_sequences(seals, indices)
        shares.append(Share(part, lengths.take(indices), wanted, places, of_all, counts, own))
        needed.append(indices)
    return Cut(shares, needed, tokens)


def _counts(batch: SequenceBatch, mini_batches: Sequence[Int64Array]) -> list[LossCounts]:
    """Masked tokens of each mini-batch, and sequences that have any, each for its share."""
    running = np.concatenate([[0], np.cumsum(batch.mask)])
    offsets = offsets_of(batch.response_lengths)
    per_sequence = running[offsets[1:]] - running[offsets[:-1]]
    weights = (per_sequence > 0).astype(np.float64)
    if batch.shares is not None:
        weights[weights > 0] = batch.shares[offsets[:-1][weights > 0]]
    return [
        LossCounts(int(per_sequence[mini_batch].sum()), float(weights[mini_batch].sum())) for mini_batch in mini_batches
    ]
