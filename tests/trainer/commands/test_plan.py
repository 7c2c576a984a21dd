"""`rljob plan`: what it prints and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rljob_trainer.cli import main

ROOT = Path(__file__).parents[3]
JOB = str(ROOT / "examples" / "gsm8k.yaml")


def test_it_shows_the_job_and_other_splits(capsys: pytest.CaptureFixture[str]) -> None:
    pools = ["--set", "trainer.gpusPerReplica=4", "--set", "rollout.replicas=4"]
    times = ["--generation", "20", "--training", "30", "--steps", "6", "--lengths", "lognormal:120,0.7"]
    assert main(["plan", JOB, *pools, *times]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("responses: log-normal, median 120 tokens")
    job = next(line for line in lines if line.startswith("job "))
    assert job.split()[:3] == ["job", "sync", "4:4"]
    assert 45 < float(job.split()[3]) < 55
    assert sum("oneStepOff" in line for line in lines) >= 7
    assert sum("best" in line for line in lines) == 1


def test_json_holds_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", JOB, "--generation", "20", "--training", "30", "--steps", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["rows"][0]["split"] == {"engines": 1, "devices_per_engine": 1, "ranks": 1, "colocated": False}
    assert plan["rows"][0]["forecast"]["step_seconds"] > 40


def test_it_wants_compute_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", JOB, "--generation", "20"]) == 64
    assert "plan needs timings: pass --measured DIR, or --generation S and --training S" in capsys.readouterr().err
    assert main(["plan", JOB, "--generation", "20", "--training", "3", "--steps", "2"]) == 64
