"""Limits of the mismatch in runs whose engines sample at another temperature."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from real_runs import Runner, metrics_of
from tiny_job import copy_job

PROGRAM = (str(Path(__file__).with_name("wrong_sampler.py")),)


def job_with(limits: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Prompts 24 to 31 are the fourth step's."""
    algorithm = {
        "preset": "grpo",
        "kl": {"inLoss": {"coefficient": 0}},
        "rolloutCorrection": {"limits": limits},
    }
    batch = {"groups": 8, "samplesPerPrompt": 4}
    return copy_job(**{"algorithm": algorithm, "batch": batch, "validation": {"atStart": False}} | spec)


def wrong(**said: Any) -> dict[str, Any]:
    return {"program": PROGRAM, "environment": {"WRONG_SAMPLER": json.dumps({"temperature": 0.1} | said)}}


def test_a_run_rolls_back_to_before_the_breach_and_no_version_is_used_twice(runner: Runner) -> None:
    job = job_with(
        {"kl": 0.5, "effectiveSampleSize": 0.5, "action": "rollBack", "patience": 2},
        checkpoint={"everySteps": 1, "keep": 1},
        rollout={"engine": "torch", "maxResponseTokens": 3, "replicas": 1},
        placement="separate",
        stop={"steps": 7},
    )
    output = runner.folder / "output"
    printed = runner.run("run", runner.write(job), "--output", output, **wrong(first=24, last=39, times=1))
    # Steps 4 and 5 are wrong; a checkpoint of step 4 would have taken the place of that of step 3.
    assert "no checkpoint of step 4" in printed
    assert "back to the checkpoint of step 3 with new engines (1 of 2 times)" in printed
    records = metrics_of(output)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6, 7]
    assert [r["mismatch/roll_backs"] for r in records] == [0, 0, 0, 1, 1, 1, 1]
    assert max(r["mismatch/kl"] for r in records) < 1e-6
    # The run began with version 0. 1 to 4 were published before the breach was acted upon, step 5 publishes 5: 6 is the
    # checkpoint's own.
    assert [r["progress/version"] for r in records] == [1, 2, 3, 7, 8, 9, 10]
    with sqlite3.connect(output / "ledger.sqlite") as ledger:
        assert [v for (v,) in ledger.execute("SELECT version FROM versions ORDER BY version")] == list(range(11))
        states = dict(ledger.execute("SELECT state, count(*) FROM groups GROUP BY state"))
        asked = dict(ledger.execute("SELECT ordinal, times_asked FROM groups"))
    assert states == {"trained": 56}
    assert len(asked) == 56
    events = json.loads((output / "timeline.json").read_text())["traceEvents"]
    assert "rolled back to step 3" in {event["name"] for event in events}
    assert json.loads((output / "summary.json").read_text())["resumed_from_step"] == 3


def test_a_run_that_goes_wrong_again_and_again_ends_with_a_clear_error(runner: Runner) -> None:
    job = job_with({"kl": 0.5, "action": "rollBack", "patience": 1, "rollBacks": 1}, checkpoint={"everySteps": 1})
    output = runner.folder / "output"
    printed = runner.run("run", runner.write(job), "--output", output, expect=65, **wrong(first=24))
    assert "(1 of 1 times)" in printed
    assert "rolling back 1 times (limits.rollBacks) did not help" in printed
    status = json.loads((output / "status.json").read_text())
    assert status["end"]["exitCode"] == 65
    assert status["mismatch"].startswith("mismatch/kl")
    # What is left is from before: the next attempt starts there.
    assert [path.name for path in sorted((output / "checkpoints").glob("step-*"))][-1] == "step-00000003"


def test_the_correction_is_switched_on_and_stays_on_after_a_resume(runner: Runner) -> None:
    job = runner.write(job_with({"kl": 0.5, "action": "correct", "patience": 2}, checkpoint={"everySteps": 1}))
    output = runner.folder / "output"
    printed = runner.run("run", job, "--output", output, "--steps", "6", **wrong(first=24))
    assert "step 5: the log-probs of engines and trainer differ too much" in printed
    assert "importance weights will correct for it, starting with the next batch" in printed
    runner.run("run", job, "--output", output, "--steps", "7", **wrong(first=24))
    records = {r["step"]: r for r in metrics_of(output)}
    assert [records[step]["mismatch/correcting"] for step in (4, 5, 6, 7)] == [0, 1, 1, 1]
    # Only a corrected batch has weights; they are cut at 2.
    assert ["rollout_correction/weight/max" in records[step] for step in (4, 5, 6, 7)] == [False, False, True, True]
    assert records[6]["rollout_correction/weight/max"] == pytest.approx(2.0)
    assert records[6]["rollout_correction/k3_kl"] == pytest.approx(records[6]["mismatch/kl"], rel=1e-4)
