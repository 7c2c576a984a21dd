"""What the driver sends to a rank and what comes back: its data index's share, cut into micro-batches.

Cutting and putting together happen on the driver (``group.py``), in numpy; a rank only ever sees its own share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from rljob_trainer.algorithms.aggregation import LossCounts
from rljob_trainer.episodes.tokens import FloatArray
from rljob_trainer.learner.backend import Placement, RowRules
from rljob_trainer.learner.packing import Bins, check_batch, plan, ranges, take
from rljob_trainer.learner.prefixes import Lengths, offsets_of
from rljob_trainer.learner.protocol import Int64Array, SequenceBatch
from rljob_trainer.learner.seals import Seals, of_sequences, seals_of
from rljob_trainer.learner.usage import Usage

Told = TypeVar("Told")


@dataclass(frozen=True, slots=True)
class Share:
    """One data index's part of a call."""

    batch: SequenceBatch
    """The sequences that it needs, each once."""
    lengths: Lengths
    micro_batches: list[list[Int64Array]]
    """``[mini-batch][micro-batch]`` indices into ``batch``; an empty one only takes part in collectives."""
    places: list[list[Int64Array]]
    """The same shape: positions of those sequences in the whole mini-batch."""
    lengths_of_all: list[Int64Array]
    """``[mini-batch]`` response lengths of its sequences at all data indices, ``[S]``."""
    counts: list[LossCounts]
    """``[mini-batch]`` over all data indices."""
    seals: Seals = field(default_factory=dict)
    """Of ``batch``, as the driver had it."""

    def outline(self) -> Share:
        """A share of as many micro-batches without any sequence."""
        nobody = np.empty(0, dtype=np.int64)
        empty = [[nobody for _ in own] for own in self.micro_batches]
        batch, lengths = take(self.batch, nobody), self.lengths.take(nobody)
        return Share(batch, lengths, empty, empty, self.lengths_of_all, self.counts)


@dataclass(slots=True)
class StepReport:
    """One optimizer step on one rank. ``sums`` are shares that add up over data indices, and extremes (names in /max
    or /min); the rest is equal on all ranks."""

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
    loads: dict[str, float] = field(default_factory=dict)
    """How evenly the actor's experts were used, over all ranks; empty where there are none."""

    def largest_norms(self) -> dict[str, float]:
        """The largest norms of the gradients of the optimizer steps that were taken, by model."""
        norms: dict[str, float] = {}
        for step in self.steps:
            if step.problem is None:
                norms[step.model] = max(norms.get(step.model, 0.0), step.grad_norm)
        return norms


@dataclass(frozen=True, slots=True)
class Cut:
    """A call's shares, one for each data index, and where their sequences stand in the whole batch."""

    shares: list[Share]
    indices: list[Int64Array]
    """``[data index]`` indices of the share's sequences in the batch."""
    tokens: list[int]
    """``[data index]`` row tokens over all mini-batches."""
    placement: Sequence[Placement]
    """``[rank]``."""

    def sent(self) -> list[Share]:
        """``[rank]``: its data index's share, or for a rank that needs no inputs one with as many micro-batches, all of
        them empty."""
        outlines: dict[int, Share] = {}
        result = []
        for place in self.placement:
            share = self.shares[place.data_index]
            if not place.needs_inputs:
                share = outlines.setdefault(place.data_index, share.outline())
            result.append(share)
        return result

    def returned(self, told: Sequence[Told]) -> list[Told]:
        """``[data index]``, of what every rank has told: that of the rank that returns the outputs."""
        by_index = {
            place.data_index: of_rank
            for place, of_rank in zip(self.placement, told, strict=True)
            if place.returns_outputs
        }
        return [by_index[index] for index in range(len(self.shares))]

    def merge(
        self, batch: SequenceBatch, parts: Sequence[FloatArray], *, per_sequence: bool = False, only: int | None = None
    ) -> FloatArray:
        """Puts the data indices' streams (in the order of their micro-batches) back into the order of ``batch``.

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
    batch: SequenceBatch, mini_batches: Sequence[Sequence[int]], placement: Sequence[Placement], rules: RowRules
) -> Cut:
    """Plans a call for ranks in these places by a backend's rules.

    Raises ``ValueError`` for a malformed batch or an index out of range.
    """
    check_batch(batch)
    seals = seals_of(batch)
    for number, mini_batch in enumerate(mini_batches):
        if len(mini_batch) and (min(mini_batch) < 0 or max(mini_batch) >= len(batch)):
            raise ValueError(f"mini-batch {number} names sequences outside 0 .. {len(batch) - 1}")
    apart = not rules.share_prefixes
    lengths = Lengths.apart(batch.prompt_lengths, batch.response_lengths) if apart else Lengths.of(batch)
    minis = [np.asarray(mini_batch, dtype=np.int64) for mini_batch in mini_batches]
    counts = _counts(batch, minis)
    data_indices = data_indices_of(placement)
    # Planned by position: an index may stand in a mini-batch more than once.
    plans: dict[bytes, list[Bins]] = {}  # epochs often cut the batch alike
    for mini in minis:
        if (key := mini.tobytes()) not in plans:
            plans[key] = plan(
                lengths.take(mini), data_indices, rules.token_limit, rules.halved_from, rules.count_multiple
            )
    planned = [plans[mini.tobytes()] for mini in minis]
    shares, needed, tokens = [], [], []
    for index in range(data_indices):
        places = [micro_batches[index] for micro_batches in planned]
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
    return Cut(shares, needed, tokens, placement)


def data_indices_of(placement: Sequence[Placement]) -> int:
    """How many there are. Raises ``ValueError`` when they have gaps, or not exactly one of an index's ranks returns
    outputs, or that one gets no inputs to put them in order by."""
    returning = sorted(place.data_index for place in placement if place.returns_outputs)
    if returning != list(range(len(returning))) or {place.data_index for place in placement} != set(returning):
        raise ValueError(
            "a backend's placement must have data indices 0, 1, ... without gaps and exactly one rank of each that "
            f"returns outputs; {returning} return outputs, of {sorted({place.data_index for place in placement})}"
        )
    return len(returning)


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
