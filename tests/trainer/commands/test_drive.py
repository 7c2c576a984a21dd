"""What a driver says last: a process that ends with 0 without it has not finished its run."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.cluster import DRIVE_FINISHED
from rljob_api.spec.pod import Pod
from rljob_trainer.commands import drive, mounted_job
from rljob_trainer.driver import run
from rljob_trainer.driver.ending import Ending


def driven(ending: Ending, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a driver whose run ends so."""

    async def run_job(*_: Any) -> Ending:
        return ending

    job = SimpleNamespace(spec=SimpleNamespace(logging=SimpleNamespace(level="info"), head=SimpleNamespace(pod=Pod())))
    monkeypatch.setattr(run, "run_job", run_job)
    monkeypatch.setattr(mounted_job, "mounted_job", lambda *_: job)
    monkeypatch.setattr(mounted_job, "options_of", lambda *_: SimpleNamespace(output=folder))
    (folder / "token").write_text("t" * 32)
    parser = argparse.ArgumentParser()
    drive.add_arguments(parser)
    options = ["--attempt", "1", "--generation", "1", "--token-file", str(folder / "token")]
    return drive.run(parser.parse_args([str(folder / "job.json"), *options]))


@pytest.mark.parametrize(
    ("ending", "code"), [(Ending("succeeded", "stop.steps = 3"), 0), (Ending("suspended", "suspended as asked"), 75)]
)
def test_only_a_run_that_has_ended_says_that_it_is_finished(
    ending: Ending, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert driven(ending, tmp_path, monkeypatch) == code
    last = capsys.readouterr().out.splitlines()[-1]
    assert (last == f"{DRIVE_FINISHED}stop.steps = 3") is (code == 0)
    assert last in (tmp_path / "logs" / "attempt-1.log").read_text() or code != 0
