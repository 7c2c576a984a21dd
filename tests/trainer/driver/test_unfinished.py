"""Tokens of open groups come back from a checkpoint as they were, with versions that count from the new number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_episodes import same_tokens

from rljob_trainer.driver import unfinished
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.errors import CheckpointError
from rljob_trainer.rollout.shelf import Shelf


def begun(*versions: int) -> Tokens:
    made = np.array(versions, np.int32)
    return Tokens.sampled(made + 10, -made.astype(np.float32) / 3, made)


@pytest.mark.parametrize("on_a_shelf", [False, True])
def test_groups_come_back_with_later_versions(tmp_path: Path, on_a_shelf: bool) -> None:
    groups = {7: {0: begun(1, 1, 2), 3: begun()}, 9: {1: begun(2), 2: begun(*range(500))}}
    unfinished.write(groups, tmp_path)
    shelf = Shelf(tmp_path)
    back = (
        unfinished.read(tmp_path, versions_later=4, keep=shelf.put)
        if on_a_shelf
        else unfinished.read(tmp_path, versions_later=4)
    )
    assert back.keys() == groups.keys()
    for ordinal, group in groups.items():
        assert back[ordinal].keys() == group.keys()
        for index, sample in group.items():
            assert same_tokens(back[ordinal][index], replace(sample, versions=sample.versions + np.int32(4)))


@pytest.mark.parametrize("impossible", [np.nan, -np.inf, np.inf, 0.5])
def test_a_sample_that_training_refuses_is_left_out_to_be_made_again(tmp_path: Path, impossible: float) -> None:
    spoilt = begun(1, 1)
    spoilt.log_probs[1] = impossible
    unfinished.write({7: {0: begun(1), 3: spoilt}, 9: {1: begun(2, 2, 2)}}, tmp_path)
    said: list[str] = []
    back = unfinished.read(tmp_path, versions_later=0, report=said.append)
    assert {ordinal: [*group] for ordinal, group in back.items()} == {7: [0], 9: [1]}
    assert np.array_equal(back[9][1].versions, [2, 2, 2])
    assert said == ["sample 3 of prompt 7 has a log-prob that no sampled token can have: it is made again"]


def test_nothing_is_nothing_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert unfinished.read(tmp_path, versions_later=0) == {}
    unfinished.write({}, tmp_path)
    assert unfinished.read(tmp_path, versions_later=0) == {}
    (tmp_path / unfinished.FILE).write_bytes(b"PK half")
    with pytest.raises(CheckpointError, match=r"groups.npz cannot be read"):
        unfinished.read(tmp_path, versions_later=0)


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    unfinished.write({7: {0: begun(*range(1000))}}, tmp_path)
    file = tmp_path / unfinished.FILE
    data = bytearray(file.read_bytes())
    data[data.index(b"log_probs.npy") + 1000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"groups.npz cannot be read: Bad CRC-32 for file 'log_probs.npy'"):
        unfinished.read(tmp_path, versions_later=0)
