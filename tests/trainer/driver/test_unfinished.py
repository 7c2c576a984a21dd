"""Tokens of open groups come back from a checkpoint as they were, with versions that count from the new number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rljob_trainer.driver import unfinished
from rljob_trainer.errors import CheckpointError
from rljob_trainer.rollout.protocol import Begun
from rljob_trainer.rollout.shelf import Shelf


def begun(*versions: int) -> Begun:
    made = np.array(versions, np.int32)
    return Begun(made + 10, made.astype(np.float32) / 3, made)


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
            assert np.array_equal(back[ordinal][index].token_ids, sample.token_ids)
            assert np.array_equal(back[ordinal][index].log_probs, sample.log_probs)
            assert np.array_equal(back[ordinal][index].versions, sample.versions + 4)


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
    data[data.index(b"token_ids.npy") + 1000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"groups.npz cannot be read: Bad CRC-32 for file 'token_ids.npy'"):
        unfinished.read(tmp_path, versions_later=0)
