"""`rljob status DIR` of a run whose process lives, and of one that was killed."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rljob_api.status import DriverStatus, LastCheckpoint, Pools, RolloutStatus, TrainerStatus
from rljob_trainer.cli import main

HOLDS = """
import sys, time
from pathlib import Path
from rljob_trainer.record.output import OutputFolder

with OutputFolder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("place", "written", "onwards"),
    [
        (None, False, "starts over, because there is no checkpoint"),
        ("s3://bucket/run", False, "continues the run"),
        # What it has started from.
        ("/another/run", False, "starts over, because there is no checkpoint"),
        # The status is written every few seconds.
        (None, True, "continues the run"),
    ],
)
def test_a_run_that_was_killed_is_not_said_to_work(
    tmp_path: Path, place: str | None, written: bool, onwards: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, now = tmp_path / "run", datetime.now(UTC)
    with subprocess.Popen([sys.executable, "-c", HOLDS, folder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        status = DriverStatus(
            generation=0,
            attempt=1,
            time=now,
            step=21,
            doing="the trainer is working: update",
            eta=now,
            pools=Pools(rollout=RolloutStatus(desired=1, ready=1), trainer=TrainerStatus(desired=1, ready=1)),
            checkpoint=None if place is None else LastCheckpoint(uri=place, step=20, time=now),
        )
        (folder / "status.json").write_text(status.model_dump_json(by_alias=True, exclude_none=True))
        assert main(["status", str(folder)]) == 0
        first, doing, *_ = capsys.readouterr().out.splitlines()
        assert first.endswith(" left")
        assert doing == "the trainer is working: update"
        if written:
            (folder / "checkpoints/step-00000021").mkdir(parents=True)
            (folder / "checkpoints/step-00000021/manifest.json").touch()
        process.kill()
        process.wait()
        assert main(["status", str(folder)]) == 0
    first, gone, last, *_ = capsys.readouterr().out.splitlines()
    assert first == "step 21, version 0, attempt 1"
    assert gone == f"the run's process is gone: it was killed, or its machine went down; the same command {onwards}"
    assert last.startswith("its last status, ")
    assert last.endswith(" ago: the trainer is working: update")
