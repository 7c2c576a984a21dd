"""Fencing: a driver that was given up and comes back neither saves nor publishes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rljob_trainer.checkpoints.checkpoint import latest
from rljob_trainer.checkpoints.folder import FolderCheckpoints
from rljob_trainer.errors import CheckpointError, OutputError, UnreachableError, UnreadableError, exit_code_of
from rljob_trainer.record import fence
from rljob_trainer.record.fence import Fence, FencedError
from rljob_trainer.storage.small import LocalFile

pytestmark = pytest.mark.integrity


@pytest.fixture
def file(tmp_path: Path) -> LocalFile:
    return LocalFile(tmp_path / "attempt.json")


def test_attempts_count_up_and_an_older_one_cannot_begin(file: LocalFile) -> None:
    assert [Fence.take(file).attempt for _ in range(3)] == [1, 2, 3]
    assert Fence.take(file, 7).attempt == 7
    with pytest.raises(FencedError, match=r"attempt 7 has taken over .*; attempt 6 must not continue"):
        Fence.take(file, 6)


async def test_an_older_attempt_neither_commits_nor_publishes(file: LocalFile, tmp_path: Path) -> None:
    old = Fence.take(file, 1)
    old.announce(1)
    Fence.take(file, 2)
    store = FolderCheckpoints(tmp_path / "checkpoints", keep=2)

    async def save(folder: str) -> None:
        Path(folder, "weights").write_text("old")

    begun: list[None] = []

    def first_then_check() -> None:
        if begun:
            old.check()
        begun.append(None)

    for may_commit in (old.check, first_then_check):
        with pytest.raises(FencedError, match="attempt 2 has taken over; attempt 1 no longer saves or publishes"):
            await store.write(4, {}, save, may_commit=may_commit)
        assert latest(store, print) is None
        assert not list(tmp_path.glob("checkpoints/*"))
    with pytest.raises(FencedError):
        old.announce(2)


def test_versions_of_an_attempt_are_below_what_the_next_one_is_told(file: LocalFile) -> None:
    first = Fence.take(file)
    for version in range(1, 200):
        first.announce(version)
    assert Fence.take(file).versions >= 199


def test_a_damaged_file_is_named(file: LocalFile, tmp_path: Path) -> None:
    (tmp_path / "attempt.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"attempt.json cannot be read"):
        Fence.take(file)


def test_a_folder_in_its_place_is_not_tried_again(file: LocalFile, tmp_path: Path) -> None:
    (tmp_path / "attempt.json").mkdir()
    with pytest.raises(CheckpointError, match=r"attempt.json cannot be read .*Is a directory.* remove it") as caught:
        Fence.take(file)
    assert exit_code_of(caught.value) == 66


def test_a_file_that_cannot_be_read_is_tried_again(file: LocalFile, tmp_path: Path) -> None:
    (tmp_path / "attempt.json").symlink_to(tmp_path / "attempt.json")  # it cannot be opened, not even by root
    with pytest.raises(UnreadableError, match=r"attempt.json cannot be read") as caught:
        Fence.take(file)
    assert exit_code_of(caught.value) == 75


class Full:
    """A file on a disk that has no room for a while."""

    place = "full/attempt.json"

    def __init__(self, file: LocalFile, failures: int) -> None:
        self.file, self.failures = file, failures

    def read(self) -> str | None:
        return self.file.read()

    def write(self, text: str) -> None:
        if self.failures:
            self.failures -= 1
            raise OutputError(f"cannot write {self.place}") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.file.write(text)


async def test_the_number_of_a_version_waits_for_room(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "_PAUSE_SECONDS", 0.01)
    full = Full(file, 0)
    taken = Fence.take(full)
    full.failures = 2
    await taken.announce_patiently(1, 60)
    assert Fence.take(file).versions >= 1


class Away:
    """An object in a store that does not answer for a while."""

    place = "s3://bucket/attempt.json"

    def __init__(self, file: LocalFile) -> None:
        self.file, self.failures = file, 0

    def read(self) -> str | None:
        if self.failures:
            self.failures -= 1
            raise UnreachableError(f"{self.place} cannot be read")
        return self.file.read()

    def write(self, text: str) -> None:
        self.file.write(text)


async def test_the_number_of_a_version_waits_for_a_store_that_is_away(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "_PAUSE_SECONDS", 0.01)
    away = Away(file)
    taken = Fence.take(away)
    away.failures = 3
    await taken.announce_patiently(1, 60)
    assert Fence.take(file).versions >= 1


async def test_a_number_that_could_not_be_written_is_not_taken_for_reserved(file: LocalFile) -> None:
    full = Full(file, 0)
    taken = Fence.take(full)
    full.failures = 2
    for _ in range(2):
        with pytest.raises(OutputError) as raised:
            await taken.announce_patiently(1, 0)
        assert exit_code_of(raised.value) == 73
    taken.announce(1)
    assert Fence.take(file).versions >= 1
