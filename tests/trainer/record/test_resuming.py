"""What a start makes of what it finds: it goes on, or says why not, and deletes nothing that it has not understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_trainer.checkpoints.checkpoint import FORMAT
from rljob_trainer.checkpoints.folder import FolderCheckpoints
from rljob_trainer.errors import CheckpointError, UnreadableError, exit_code_of
from rljob_trainer.record.output import OutputFolder
from rljob_trainer.record.place import state_of
from rljob_trainer.record.resuming import Start, where_to_start

pytestmark = pytest.mark.integrity


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """The output folder of a run that has checkpoints of steps 1 and 2."""

    async def save(place: str) -> None:
        Path(place, "weights").write_bytes(b"weights")

    checkpoints = FolderCheckpoints(tmp_path / "checkpoints", 3)
    for step in (1, 2):
        await checkpoints.write(step, {}, save)
    (tmp_path / "job.yaml").write_text("{}")
    (tmp_path / ".lock").touch()
    return tmp_path


def start(folder: Path, resume: str = "auto", restore: str | None = None) -> tuple[Start, list[str]]:
    told: list[str] = []
    with OutputFolder(folder) as output:
        return where_to_start(resume, restore, output, state_of(output, None, 3), told.append), told


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_damaged_checkpoint_is_set_aside_and_named(folder: Path) -> None:
    (folder / "checkpoints/step-00000002/driver.json").write_text("x")
    begun, told = start(folder)
    assert begun.checkpoint is not None
    assert (begun.checkpoint.step, begun.own) == (1, True)
    assert names(folder) == ["aside-1-step-00000002", "step-00000001"]
    assert any("aside-1-step-00000002" in line and "checkpoint.keep" in line for line in told)


def test_one_that_cannot_be_read_stays_where_it_is_and_so_do_those_before(folder: Path) -> None:
    file = folder / "checkpoints/step-00000002/manifest.json"
    file.unlink()
    file.symlink_to(file)  # it cannot be opened, not even by root
    with pytest.raises(UnreadableError, match=r"step-00000002/manifest\.json cannot be read"):
        start(folder)
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_a_run_none_of_whose_checkpoints_can_be_used_does_not_begin_anew_by_itself(folder: Path) -> None:
    for step in (1, 2):
        (folder / f"checkpoints/step-0000000{step}/driver.json").write_text("x")
    with pytest.raises(
        CheckpointError, match=r"none of the checkpoints .* \(steps 1, 2\).* --resume never` starts over"
    ) as caught:
        start(folder)
    assert exit_code_of(caught.value) == 66
    assert names(folder) == ["step-00000001", "step-00000002"]
    begun, _ = start(folder, "never")
    assert begun.checkpoint is None
    assert (folder / "earlier-1/checkpoints/step-00000002").is_dir()


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("{}")
    (tmp_path / ".lock").touch()
    begun, told = start(tmp_path)
    assert begun == Start(None, own=False)
    assert told == [
        f"an earlier run in {tmp_path} ended before its first checkpoint, so this one starts over",
        f"moved the files of an earlier run to {tmp_path / 'earlier-1'}",
    ]
    assert start(tmp_path)[1] == []


def test_one_that_starts_from_another_run_s_checkpoint_does_not_begin_anew(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "job.yaml").write_text("{}")
    (other / ".lock").touch()
    begun, told = start(other, restore=str(folder))
    assert begun.checkpoint is not None
    assert not any("starts over" in line for line in told)


@pytest.mark.parametrize("steps", [(2,), (1, 2)])
def test_a_checkpoint_of_another_version_is_not_stepped_over(folder: Path, steps: tuple[int, ...]) -> None:
    for step in steps:
        manifest = folder / f"checkpoints/step-0000000{step}/manifest.json"
        manifest.write_text(manifest.read_text().replace(f'"format": {FORMAT}', '"format": 91'))
    with pytest.raises(CheckpointError, match=f"step-00000002 has format 91; .* reads {FORMAT}") as caught:
        start(folder)
    assert exit_code_of(caught.value) == 66
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_a_folder_without_checkpoints_begins_anew(folder: Path) -> None:
    for step in (1, 2):
        (folder / f"checkpoints/step-0000000{step}").rename(folder / f"moved-{step}")
    begun, _ = start(folder)
    assert begun.checkpoint is None
