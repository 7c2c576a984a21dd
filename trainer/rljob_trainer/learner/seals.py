"""What the driver says of the sequences that it sends to a rank, so that the rank can tell whether they arrived.

One digest for each sequence and stream: a rank that finds another names both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rljob_trainer.episodes.receipts import digests
from rljob_trainer.errors import LearnerError
from rljob_trainer.learner.packing import STREAMS
from rljob_trainer.learner.prefixes import offsets_of
from rljob_trainer.learner.protocol import Int64Array, SequenceBatch

Seals = Mapping[str, Sequence[int]]
"""``[S]`` digests by stream; ``token_ids`` stands for prompt and response together."""

_NAMED = 3


def seals_of(batch: SequenceBatch) -> dict[str, list[int]]:
    """The seals of every stream that the batch has."""
    rows = offsets_of(batch.prompt_lengths + batch.response_lengths).tolist()
    tokens = offsets_of(batch.response_lengths).tolist()
    seals = {"token_ids": digests(batch.token_ids, rows)}
    if batch.routed_experts is not None:
        seals["routed_experts"] = digests(batch.routed_experts, rows)
    for name in STREAMS:
        if (stream := getattr(batch, name)) is not None:
            seals[name] = digests(stream, tokens)
    return seals


def of_sequences(seals: Seals, indices: Int64Array) -> dict[str, list[int]]:
    """The seals of some sequences, in that order."""
    return {name: [digests[i] for i in indices.tolist()] for name, digests in seals.items()}


def check(batch: SequenceBatch, seals: Seals, rank: int) -> None:
    """Raises ``LearnerError`` naming the streams and sequences that are not as they were sent."""
    found = seals_of(batch)
    wrong = {
        name: [i for i, (sent, here) in enumerate(zip(digests, found.get(name, []), strict=False)) if sent != here]
        for name, digests in seals.items()
        if list(digests) != found.get(name)
    }
    if wrong:
        told = "; ".join(
            f"the {name.replace('_', ' ')} of {len(places)} sequences (of the rank's share, first "
            f"{', '.join(map(str, places[:_NAMED]))})"
            for name, places in wrong.items()
        )
        raise LearnerError(
            f"learner rank {rank}: data differs from what the driver sent: {told}. Nothing was trained on it. Start "
            "again: the run continues from its last checkpoint; if it happens again, check memory and network of this "
            "rank's machine"
        )
