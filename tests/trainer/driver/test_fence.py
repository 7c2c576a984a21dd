"""Fencing: a driver that was given up and comes back neither saves nor publishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_trainer.checkpoint import CheckpointStore
from rljob_trainer.driver.fence import Fence, FencedError
from rljob_trainer.errors import CheckpointError


def test_attempts_count_up_and_an_older_one_cannot_begin(tmp_path: Path) -> None:
    assert [Fence.take(tmp_path).attempt for _ in range(3)] == [1, 2, 3]
    assert Fence.take(tmp_path, 7).attempt == 7
    with pytest.raises(FencedError, match=r"attempt 7 has taken over .*; attempt 6 must not go on"):
        Fence.take(tmp_path, 6)


async def test_an_older_attempt_neither_commits_nor_publishes(tmp_path: Path) -> None:
    old = Fence.take(tmp_path, 1)
    old.announce(1)
    Fence.take(tmp_path, 2)
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)

    async def save(folder: Path) -> None:
        (folder / "weights").write_text("old")

    with pytest.raises(FencedError, match="attempt 2 has taken over; attempt 1 neither saves nor publishes"):
        await store.write(4, {}, save, may_commit=old.check)
    assert store.latest(print) is None
    with pytest.raises(FencedError):
        old.announce(2)


def test_versions_of_an_attempt_are_below_what_the_next_one_is_told(tmp_path: Path) -> None:
    first = Fence.take(tmp_path)
    for version in range(1, 200):
        first.announce(version)
    assert Fence.take(tmp_path).versions >= 199


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "attempt.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"attempt.json cannot be read"):
        Fence.take(tmp_path)
