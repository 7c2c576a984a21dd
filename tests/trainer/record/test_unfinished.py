"""Tokens of open groups come back from a checkpoint as they were, with versions that count from the new number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_episodes import same_tokens

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import BegunTurn
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.errors import CheckpointError
from rljob_trainer.record import unfinished
from rljob_trainer.rollout.shelf import Shelf


def begun(*versions: int) -> BegunTurn:
    made = np.array(versions, np.int32)
    return BegunTurn(77, Tokens.sampled(made + 10, -made.astype(np.float32) / 3, made))


def group(ordinal: int, **samples: BegunTurn) -> dict[EpisodeId, BegunTurn]:
    """By names such as ``s3`` or, for the second turn of that sample, ``s3_1``."""
    named = {name: tuple(map(int, name[1:].split("_"))) for name in samples}
    return {EpisodeId("training", ordinal, *named[name]): turn for name, turn in samples.items()}


@pytest.mark.parametrize("on_a_shelf", [False, True])
def test_groups_come_back_with_later_versions(tmp_path: Path, on_a_shelf: bool) -> None:
    groups = {7: group(7, s0=begun(1, 1, 2), s3=begun()), 9: group(9, s1_2=begun(2), s2=begun(*range(500)))}
    unfinished.write(groups, tmp_path)
    shelf = Shelf(tmp_path)
    back = (
        unfinished.read(tmp_path, versions_later=4, keep=shelf.put)
        if on_a_shelf
        else unfinished.read(tmp_path, versions_later=4)
    )
    assert back.keys() == groups.keys()
    for ordinal, turns in groups.items():
        assert back[ordinal].keys() == turns.keys()
        for id, turn in turns.items():
            assert back[ordinal][id].context == 77
            later = replace(turn.tokens, versions=turn.tokens.versions + np.int32(4))
            assert same_tokens(back[ordinal][id].tokens, later)


@pytest.mark.parametrize("impossible", [np.nan, -np.inf, np.inf, 0.5])
def test_a_sample_that_training_refuses_is_left_out_to_be_made_again(tmp_path: Path, impossible: float) -> None:
    spoilt = begun(1, 1)
    spoilt.tokens.log_probs[1] = impossible
    unfinished.write({7: group(7, s0=begun(1), s3=spoilt), 9: group(9, s1=begun(2, 2, 2))}, tmp_path)
    said: list[str] = []
    back = unfinished.read(tmp_path, versions_later=0, report=said.append)
    assert [[id.sample for id in turns] for turns in back.values()] == [[0], [1]]
    assert next(iter(back[9].values())).tokens.versions.tolist() == [2, 2, 2]
    assert said == ["sample 3 of prompt 7 has a log-prob that no sampled token can have; it will be generated again"]


def test_nothing_is_nothing_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert unfinished.read(tmp_path, versions_later=0) == {}
    unfinished.write({}, tmp_path)
    assert unfinished.read(tmp_path, versions_later=0) == {}
    (tmp_path / unfinished.FILE).write_bytes(b"PK half")
    with pytest.raises(CheckpointError, match=r"groups.npz cannot be read"):
        unfinished.read(tmp_path, versions_later=0)


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    unfinished.write({7: group(7, s0=begun(*range(1000)))}, tmp_path)
    file = tmp_path / unfinished.FILE
    data = bytearray(file.read_bytes())
    data[data.index(b"log_probs.npy") + 1000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"groups.npz cannot be read: Bad CRC-32 for file 'log_probs.npy'"):
        unfinished.read(tmp_path, versions_later=0)
