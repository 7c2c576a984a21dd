"""The output folder: whose it is, and what is moved aside in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from rljob_trainer.cli import main
from rljob_trainer.errors import OutputError
from rljob_trainer.record.output import OutputFolder, is_held


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_that_is_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    """`--output .`, or "" from a variable that is not set: nothing is moved, nothing is written."""
    for name in ("job.yaml", "data.jsonl", "thesis.tex", ".git"):
        (tmp_path / name).write_text("mine")
    before = names(tmp_path)
    for _ in range(2):
        with pytest.raises(OutputError, match=r"is not empty \(.git, data.jsonl, job.yaml ...\) and contains no run"):
            OutputFolder(tmp_path).__enter__()
        assert names(tmp_path) == before


@pytest.mark.parametrize("place", [".", ""])
def test_a_run_into_the_current_folder_says_so(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
    (tmp_path / "mine.yaml").write_text(example.read_text())
    monkeypatch.chdir(tmp_path)
    assert main(["run", "mine.yaml", "--output", place, "--resume", "never"]) == 1
    assert "is not empty (mine.yaml) and contains no run; pass a new" in capsys.readouterr().err
    assert names(tmp_path) == ["mine.yaml"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(OutputError, match=r"run is a file; pass a folder with --output"):
        OutputFolder(tmp_path / "run").__enter__()
    assert (tmp_path / "run").read_text() == "mine"


def test_a_new_disk_and_the_lines_of_earlier_attempts_are_no_hindrance(tmp_path: Path) -> None:
    for name in ("logs", "lost+found"):
        (tmp_path / name).mkdir()
    with OutputFolder(tmp_path):
        pass


def test_what_a_run_left_is_moved_aside_under_the_next_number(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "run") as output:
        assert output.set_aside() is None
        for number in (1, 2):
            (output.path / "metrics.jsonl").write_text(str(number))
            assert output.set_aside() == output.path / f"earlier-{number}"
        (output.path / "earlier-notes").write_text("a user's")
        assert output.set_aside() == output.path / "earlier-3"
        assert names(output.path / "earlier-3") == ["earlier-notes"]
    with OutputFolder(tmp_path / "run"):  # it is a run's now, whatever is in it
        pass


def test_a_place_where_there_can_be_no_folder_is_not_said_to_lack_room() -> None:
    with pytest.raises(OutputError, match=r"cannot write /proc/nope/x: [^;]*; choose another folder with --output$"):
        OutputFolder(Path("/proc/nope/x")).__enter__()


@pytest.mark.parametrize("left", [None, 0o644])
def test_the_lock_is_its_owners_also_one_that_was_left_open_to_others(tmp_path: Path, left: int | None) -> None:
    if left is not None:
        (tmp_path / ".lock").touch(left)
        (tmp_path / ".lock").chmod(left)
    with OutputFolder(tmp_path):
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600


def test_a_forked_child_that_outlives_the_run_does_not_keep_its_folder(tmp_path: Path) -> None:
    text = """
import os, sys, time
import subprocess
import sys
from pathlib import Path
from rljob_trainer.record.output import OutputFolder, is_held
with OutputFolder(Path(sys.argv[1])):
    if not os.fork():
        print(os.getpid(), flush=True)
        os.read(0, 1)  # until the test has ended
    os._exit(0)
"""
    with subprocess.Popen([sys.executable, "-c", text, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        run.wait()
        assert psutil.pid_exists(child)
        assert is_held(tmp_path) is False


def test_a_run_whose_descriptors_are_closed_by_code_of_the_job_ends(tmp_path: Path) -> None:
    text = """
import os, sys, threading
from pathlib import Path
from rljob_trainer.record.output import OutputFolder
with OutputFolder(Path(sys.argv[1])):
    os.closerange(3, 1000)
    threading.Event().wait()
"""
    run = subprocess.run([sys.executable, "-c", text, tmp_path], capture_output=True, text=True)
    assert run.returncode == 65
    assert run.stderr.startswith("rljob: the files and sockets of this process were closed, by a reward function")
    assert is_held(tmp_path) is False


def test_a_store_that_does_not_answer_for_a_moment_ends_no_run(tmp_path: Path) -> None:
    """An error other than "no such descriptor" does not say that the lock is gone."""
    text = """
import errno, os, sys, threading
from pathlib import Path
from rljob_trainer.record import output
output._LOOKS_EVERY = 0.01
asked, fstat = threading.Event(), os.fstat
def failing(descriptor):
    if threading.current_thread() is threading.main_thread():
        return fstat(descriptor)
    asked.set()
    raise OSError(errno.EIO, "Input/output error")
with output.OutputFolder(Path(sys.argv[1])):
    os.fstat = failing
    for _ in range(2):
        asked.wait()
        asked.clear()
"""
    run = subprocess.run([sys.executable, "-c", text, tmp_path], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
