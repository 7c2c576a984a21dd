"""A checkpoint is whole or not there, and a damaged one is noticed, named and stepped over."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from rljob_trainer.checkpoints.checkpoint import FORMAT, driver_state, latest
from rljob_trainer.checkpoints.folder import FolderCheckpoints, open_folder
from rljob_trainer.errors import CheckpointError, UnreadableError, exit_code_of

pytestmark = pytest.mark.integrity


async def write(store: FolderCheckpoints, step: int) -> Path:
    async def save(folder: str) -> None:
        Path(folder, "weights").write_bytes(bytes([step % 256]) * 1000)

    return (await store.write(step, {"step": step}, save)).files()


async def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path, keep=3)
    await write(store, 7)
    newest = latest(store, report=pytest.fail)
    assert newest is not None
    assert newest.step == 7
    assert driver_state(newest.files()) == {"step": 7}
    assert Path(newest.learner, "weights").read_bytes() == b"\x07" * 1000


async def test_only_the_last_k_are_kept_in_order_of_steps(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path, keep=2)
    for step in (5, 9, 10, 100):
        await write(store, step)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000010", "step-00000100"]


async def test_who_has_been_replaced_begins_nothing(tmp_path: Path) -> None:
    def taken_over() -> None:
        raise CheckpointError("attempt 2 has taken over")

    async def save(_folder: str) -> None:
        pytest.fail("ranks would write on when their driver has ended")

    with pytest.raises(CheckpointError, match="attempt 2"):
        await FolderCheckpoints(tmp_path, keep=2).write(1, {}, save, may_commit=taken_over)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda p: (p / "learner/weights").write_bytes(b"x" * 500), "learner/weights has 500 bytes, not 1000"),
        (lambda p: (p / "learner/weights").write_bytes(b"x" * 1000), "content of learner/weights has changed"),
        (lambda p: (p / "learner/weights").unlink(), "learner/weights is missing"),
        (lambda p: (p / "manifest.json").unlink(), "no manifest.json"),
        (lambda p: (p / "manifest.json").write_text('{"format": 1, "st'), "unreadable manifest.json"),
    ],
)
async def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, damage, named) -> None:
    store = FolderCheckpoints(tmp_path, keep=3)
    await write(store, 1)
    damage(await write(store, 2))
    with pytest.raises(CheckpointError, match=named):
        open_folder(tmp_path / "step-00000002")
    reports: list[str] = []
    newest = latest(store, reports.append)
    assert newest is not None
    assert newest.step == 1
    assert len(reports) == 1
    assert named in reports[0]


async def test_when_none_is_whole_the_last_that_was_tried_says_so(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path, keep=3)
    for step in (1, 2):
        (await write(store, step) / "manifest.json").unlink()
    reports: list[str] = []
    assert latest(store, reports.append) is None
    assert [report.partition("manifest.json. ")[2] for report in reports] == [
        "Trying the previous checkpoint.",
        "There is no earlier checkpoint.",
    ]


async def test_a_write_that_fails_leaves_the_earlier_ones_and_no_rest(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path, keep=3)
    await write(store, 1)

    async def full_disk(folder: str) -> None:
        Path(folder, "half").write_bytes(b"1")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        await store.write(2, {}, full_disk)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


async def test_what_a_rank_adds_to_a_write_that_failed_is_removed_when_it_has_ended(tmp_path: Path) -> None:
    store, other = FolderCheckpoints(tmp_path, keep=3), tmp_path / ".writing-step-00000002-0123abcd"
    other.mkdir()
    places: list[Path] = []

    async def given_up(folder: str) -> None:
        places.append(Path(folder))
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await store.write(2, {}, given_up)
    places[0].mkdir(parents=True)
    (places[0] / "late").write_bytes(b"1")
    store.clean_own()
    assert list(tmp_path.iterdir()) == [other]  # another attempt's, which may be at work on it


async def test_what_a_killed_writer_left_is_never_read_and_is_cleaned(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path, keep=3)
    await write(store, 1)
    (tmp_path / ".writing-step-00000002").mkdir()
    newest = latest(store, report=pytest.fail)
    assert newest is not None
    assert newest.step == 1
    store.clean()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def make_unreadable(file: Path) -> None:
    """As for whoever may not read it: also for root, a link that leads to itself cannot be opened (ELOOP)."""
    file.unlink()
    file.symlink_to(file)


@pytest.mark.parametrize("name", ["manifest.json", "driver.json", "learner/weights"])
async def test_a_file_that_cannot_be_read_is_named_and_no_reason_to_go_back(tmp_path: Path, name: str) -> None:
    store = FolderCheckpoints(tmp_path, keep=3)
    await write(store, 1)
    file = await write(store, 2) / name
    make_unreadable(file)
    with pytest.raises(UnreadableError) as caught:
        latest(store, pytest.fail)
    assert str(caught.value).startswith(f"{file} cannot be read: Too many levels of symbolic links.")
    assert exit_code_of(caught.value) == 75


async def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    await write(FolderCheckpoints(folder, keep=3), 1)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(folder)
    with pytest.raises(UnreadableError, match="checkpoints cannot be read"):
        FolderCheckpoints(folder, keep=3).steps()


@pytest.mark.parametrize(
    "text", ["[" * 20_000, f'{{"format": {FORMAT}, "step": 2, "files": {{"driver.json": 3}}}}', "[]"]
)
async def test_a_manifest_of_another_shape_is_a_damaged_one(tmp_path: Path, text: str) -> None:
    store = FolderCheckpoints(tmp_path, keep=3)
    (await write(store, 2) / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"unreadable manifest\.json"):
        store.open(2)


async def test_later_checkpoints_are_set_aside_whole_and_as_many_stay_as_are_kept_otherwise(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path, keep=2)
    for step in (1, 2):
        await write(store, step)
    assert store.discard_after(1) == [str(tmp_path / "aside-1-step-00000002")]
    assert store.steps() == [1]
    assert open_folder(tmp_path / "aside-1-step-00000002").step == 2
    for step in (2, 3):
        await write(store, step)
    store.discard_after(1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["aside-1-step-00000002", "aside-2-step-00000002", "aside-3-step-00000003"]
    await write(store, 2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["aside-2-step-00000002", "aside-3-step-00000003", "step-00000002"]


async def test_an_old_one_that_cannot_be_removed_is_said_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderCheckpoints(tmp_path, keep=1)
    old = await write(store, 1)
    rename = Path.rename

    def busy(path: Path, to: Path) -> Path:
        if path == old:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", busy)  # as for a folder that something is mounted on
    await write(store, 2)
    assert "step-00000001: Device or resource busy; it stays" in caplog.text
    assert store.steps() == [1, 2]
    assert store.open(1).step == 1  # whole, not half removed
    monkeypatch.undo()
    await write(store, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


async def test_one_that_is_read_while_it_is_removed_is_no_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderCheckpoints(tmp_path, keep=1)
    await write(store, 1)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # NFS keeps files that are open
        await write(store, 2)
    assert store.steps() == [2]
    store.clean_own()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


async def test_what_cannot_be_set_aside_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderCheckpoints(tmp_path, keep=3)
    for step in (1, 2):
        await write(store, step)

    def refused(path: Path, _to: Path) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(CheckpointError, match=r"cannot set aside .*step-00000002: Read-only file system") as caught:
        store.discard_after(1)
    assert exit_code_of(caught.value) == 1


@pytest.mark.parametrize(("name", "text"), [("manifest.json", None), ("driver.json", "[1]")])
async def test_what_lists_or_holds_nothing_of_a_run_is_no_checkpoint(
    tmp_path: Path, name: str, text: str | None
) -> None:
    store = FolderCheckpoints(tmp_path, keep=3)
    files = await write(store, 1)
    if text is None:
        manifest = json.loads((files / name).read_text())
        (files / name).write_text(json.dumps(manifest | {"files": {}}))
        with pytest.raises(CheckpointError, match=r"unreadable manifest\.json: it lists no driver\.json"):
            store.open(1)
    else:
        (files / name).write_text(text)
        with pytest.raises(CheckpointError, match="is not the state of a run: expected a map, not a list"):
            driver_state(files)
