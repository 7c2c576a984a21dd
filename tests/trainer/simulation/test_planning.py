"""From a job to its plan: pools, splits, lengths and measured times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rljob_api import load_jobs, resolve
from rljob_api.resolved import ResolvedJob
from rljob_trainer.errors import DataError
from rljob_trainer.simulation.lengths import Exponential, LogNormal, parse_lengths
from rljob_trainer.simulation.measured import measure
from rljob_trainer.simulation.planning import PlannedSeconds, Planner, Split, calibrated, own_split, plan

JOB = """
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {name: planned}
spec:
  model: {source: some/model}
  data: {train: {source: some/data}, answer: answer}
  reward: {functions: [{type: math}]}
  algorithm: {preset: grpo}
  batch: {groups: 64, samplesPerPrompt: 8}
  pipeline: {mode: oneStepOff}
  rollout: {engine: vllm, replicas: 4, gpusPerReplica: 2, parallelism: {tensor: 2}, maxResponseTokens: 1000}
  trainer: {replicas: 2, gpusPerReplica: 4}
  stop: {steps: 10}
"""
LENGTHS = LogNormal(100, 0.8, 1000)


def job(*assignments: str) -> ResolvedJob:
    return resolve(load_jobs(JOB, assignments)[0])


def test_the_pools_are_those_of_the_job() -> None:
    assert own_split(job().spec) == Split(engines=4, devices_per_engine=2, ranks=8)
    assert str(own_split(job().spec)) == "8:8"
    sync = job("pipeline.mode=sync", "rollout.replicas=null", "rollout.gpusPerReplica=0")
    assert own_split(sync.spec) == Split(engines=4, devices_per_engine=2, ranks=8, colocated=True)
    assert own_split(sync.spec).devices == 8


def test_calibrated_speeds_give_back_the_times_they_were_made_from() -> None:
    written = job("pipeline.mode=sync")
    seconds = PlannedSeconds(generation=40.0, training=25.0, publication=1.0, rest=2.0)
    speeds = calibrated(written, LENGTHS, seconds)
    row = Planner(written, LENGTHS, speeds).row(own_split(written.spec), 40)
    assert row.forecast.step_seconds == pytest.approx(68.0, rel=0.03)
    assert row.training_seconds == pytest.approx(28.0)


def test_splits_share_the_same_devices_and_the_job_is_among_them() -> None:
    planner = Planner(job(), LENGTHS, calibrated(job(), LENGTHS, PlannedSeconds(40.0, 25.0)))
    splits = list(planner.splits())
    assert own_split(job().spec) in splits
    assert {split.devices for split in splits} == {16}
    assert all(split.ranks >= 2 and split.engines >= 1 for split in splits)
    assert [split.engines for split in splits] == sorted({split.engines for split in splits})


def test_a_plan_compares_with_lockstep_and_with_other_splits() -> None:
    """Generation is slow: more engines help, and no step is shorter than its slower stage alone."""
    planner = Planner(job(), LENGTHS, calibrated(job(), LENGTHS, PlannedSeconds(80.0, 20.0)))
    rows = plan(planner, 12)
    assert (rows[0].split, rows[0].mode) == (planner.own, "oneStepOff")
    assert (rows[1].split.colocated, rows[1].mode) == (True, "sync")
    best = min(rows, key=lambda row: row.forecast.step_seconds)
    assert best.split.engines > planner.own.engines
    for row in rows:
        assert row.forecast.step_seconds > 0.97 * row.limit_seconds


def test_a_sync_job_is_shown_what_one_step_off_would_give() -> None:
    sync = job("pipeline.mode=sync", "rollout.replicas=null", "rollout.gpusPerReplica=0")
    rows = plan(Planner(sync, LENGTHS, calibrated(sync, LENGTHS, PlannedSeconds(40.0, 25.0))), 8)
    assert (rows[0].mode, rows[0].split.colocated) == ("sync", True)
    assert {row.mode for row in rows[1:]} == {"oneStepOff"}
    assert {row.split.devices for row in rows} == {8}


# --- lengths


def test_distributions_have_the_means_they_say() -> None:
    rng = np.random.default_rng(1)
    assert Exponential(200, 10**6).draw(rng, 4000, 8).mean() == pytest.approx(200, rel=0.03)
    median, sigma = 100, 0.5
    drawn = LogNormal(median, sigma, 10**6).draw(rng, 4000, 8)
    assert drawn.mean() == pytest.approx(median * np.exp(sigma**2 / 2), rel=0.03)
    assert LogNormal(100, 2.0, 300).draw(rng, 100, 8).max() == 300


def test_recorded_groups_stay_together(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("1\n2\n100\n200\n")
    drawn = parse_lengths(str(file), limit=1000, n=2).draw(np.random.default_rng(0), 50, 2)
    assert {tuple(row) for row in drawn.tolist()} == {(1, 2), (100, 200)}
    for row in parse_lengths(str(file), limit=1000, n=2).draw(np.random.default_rng(0), 50, 4).tolist():
        assert set(row) <= {1, 2} or set(row) <= {100, 200}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exponential:no", "use exponential:MEAN"),
        ("lognormal:100", "use exponential:MEAN"),
        ("exponential:-4", "use exponential:MEAN"),
        ("there/is/none.txt", "No such file"),
    ],
)
def test_bad_lengths_are_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_lengths(text, limit=100, n=2)


# --- measured runs


def run_folder_with(folder: Path, mode: str, steps: int) -> Path:
    """The files of a run whose batches take 3 s to generate and 2 s to train, in steps of 5.5 s."""
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB.replace("oneStepOff", mode))
    row = {
        "timing/generate_seconds": 3.0,
        "timing/update_seconds": 1.75,
        "timing/score_seconds": 0.25,
        "timing/publish_seconds": 0.25,
        "timing/step_seconds": 5.5,
    }
    slow = {name: 10 * value for name, value in row.items()}
    rows = [{"step": step, **(slow if step <= 2 else row)} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    (folder / "samples").mkdir()
    samples = [{"source": "train", "prompt": p, "response": "", "tokens": t} for p in "ab" for t in (5, 7)]
    (folder / "samples" / "step-000001.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in samples))
    return folder


def test_a_sync_run_is_measured_after_its_first_steps(tmp_path: Path) -> None:
    measured = measure(run_folder_with(tmp_path / "run", "sync", 8))
    assert measured.seconds == PlannedSeconds(generation=3.0, training=2.0, publication=0.25, rest=0.25)
    assert set(measured.lengths.draw(np.random.default_rng(0), 10, 2).ravel().tolist()) == {5, 7}


def test_runs_that_do_not_tell_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="stages overlap"):
        measure(run_folder_with(tmp_path / "overlapping", "oneStepOff", 8))
    with pytest.raises(DataError, match="fewer than 4 steps"):
        measure(run_folder_with(tmp_path / "short", "sync", 3))
    with pytest.raises(DataError, match="is not the output folder of a run"):
        measure(tmp_path)


def test_planning_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys, rljob_trainer.simulation.planning, rljob_trainer.simulation.measured\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
