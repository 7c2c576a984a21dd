"""Sequences that do not arrive at a rank as the driver sent them are refused with stream and place."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from cut_for import cut_for

from rljob_trainer.errors import LearnerError
from rljob_trainer.learner import seals
from rljob_trainer.learner.protocol import SequenceBatch

pytestmark = pytest.mark.integrity

MakeBatch = Callable[..., SequenceBatch]
STREAMS = ("mask", "advantages", "returns", "values", "old_log_probs", "rollout_log_probs", "ref_log_probs", "weights")


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_arrives_as_it_was_cut_is_taken(make_batch: MakeBatch, ranks: int) -> None:
    batch = make_batch()
    for rank, share in enumerate(cut_for(batch, [range(len(batch))], ranks=ranks, token_budget=60).shares):
        arrived = pickle.loads(pickle.dumps(share))
        seals.check(arrived.batch, arrived.seals, rank)


@pytest.mark.parametrize("name", STREAMS)
def test_two_sequences_that_change_places_in_a_stream_are_named(make_batch: MakeBatch, name: str) -> None:
    batch = make_batch()
    sealed = seals.seals_of(batch)
    lengths = batch.response_lengths.tolist()
    first, second = next((i, j) for i in range(24) for j in range(i) if lengths[i] == lengths[j] > 4)
    ends = np.cumsum(lengths)
    one, other = (slice(ends[i] - lengths[i], ends[i]) for i in (second, first))
    stream: Any = getattr(batch, name)
    stream[one], stream[other] = stream[other].copy(), stream[one].copy()
    if np.array_equal(stream[one], stream[other]):
        stream[one.start] = not stream[one.start]
    with pytest.raises(
        LearnerError, match=rf"learner rank 2: .*the {name.replace('_', ' ')} of [12] sequences .*first"
    ):
        seals.check(batch, sealed, 2)


def test_a_token_that_changes_is_named_with_its_sequence(make_batch: MakeBatch) -> None:
    batch = make_batch()
    sealed = seals.seals_of(batch)
    batch.token_ids[int((batch.prompt_lengths + batch.response_lengths)[:5].sum())] += 1
    with pytest.raises(LearnerError, match=r"the token ids of 1 sequences \(of the rank's share, first 5\)"):
        seals.check(batch, sealed, 0)


def test_a_stream_that_is_missing_is_named(make_batch: MakeBatch) -> None:
    batch = make_batch()
    sealed = seals.seals_of(batch)
    batch = replace(batch, values=None)
    with pytest.raises(LearnerError, match="the values of"):
        seals.check(batch, sealed, 0)


def test_every_stream_of_a_batch_has_seals(make_batch: MakeBatch) -> None:
    batch = make_batch()
    per_token = {
        field.name
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), np.ndarray) and len(value) == batch.response_lengths.sum()
    }
    assert set(seals.seals_of(batch)) == per_token | {"token_ids"}
