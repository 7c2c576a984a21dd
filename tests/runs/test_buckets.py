"""`rljob run` with its state in a bucket: killed here, it goes on elsewhere as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import Runner, metrics_of, wait_for
from safetensors.torch import load_file
from tiny_job import copy_job

from rljob_trainer.checkpoints.finding import find_checkpoint
from rljob_trainer.errors import CheckpointError
from rljob_trainer.storage.bucket import ObjectBucket

MEASURED = ("timing", "throughput", "progress/seconds", "progress/version", "memory", "pipeline", "rollout", "time")


def repeatable(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.startswith(MEASURED)}


def weights(runner: Runner, place: str | Path, name: str) -> dict[str, torch.Tensor]:
    runner.run("export", place, "--to", runner.folder / name)
    return load_file(runner.folder / name / "model.safetensors")


def newest_step(place: str, scratch: Path) -> int:
    try:
        return find_checkpoint(place, scratch, print).step
    except CheckpointError:
        return 0


@pytest.mark.integrity
def test_killed_here_it_goes_on_elsewhere_as_if_nothing_had_happened(runner: Runner, object_store: Any) -> None:
    whole, here, elsewhere = (runner.folder / name for name in ("whole", "here", "elsewhere"))
    runner.run("run", runner.write(copy_job(), "folder.yaml"), "--output", whole)

    uri = object_store.place()
    job = runner.write(copy_job(checkpoint={"uri": uri, "everySteps": 2}))
    state = f"{uri}/default/tiny-local"
    process = runner.start("run", job, "--output", here)
    wait_for(lambda: newest_step(state, runner.folder) >= 2, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not [path for path in (here / "checkpoints").glob("**/*") if path.is_file() and "learner" in path.parts]

    assert "resuming from the checkpoint of step" in runner.run("run", job, "--output", elsewhere)
    assert [repeatable(r) for r in metrics_of(elsewhere)] == [repeatable(r) for r in metrics_of(whole)]
    expected, actual = weights(runner, whole, "a"), weights(runner, state, "b")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)

    kept = ObjectBucket(state)
    assert (kept.read("metrics.jsonl") or b"").decode() == (elsewhere / "metrics.jsonl").read_text()
    summary = json.loads(kept.read("summary.json") or b"")
    assert summary["report"] == f"{state}/report.html"
    assert summary["checkpoint"].startswith(f"{state}/checkpoints/step-00000006-")

    printed = runner.run("eval", job, "--run", state, "--json")
    metrics = json.loads(printed[printed.index("{") :])
    assert metrics["validation/mean"] == metrics_of(whole)[-1]["validation/mean"]

    # Another job begins with it, and then goes on from its own.
    other = copy_job(checkpoint={"everySteps": 2}, restore={"from": state}, stop={"steps": 8}, validation={"every": 9})
    other["metadata"]["name"] = "other"
    job = runner.write(other, "other.yaml")
    output = runner.folder / "other"
    printed = runner.run("run", job, "--output", output, "--steps", "7")
    assert f"starting from the checkpoint of step 6 in {summary['checkpoint']}" in printed
    assert "resuming from the checkpoint of step 7" in runner.run("run", job, "--output", output)
    assert [r["step"] for r in metrics_of(output) if r["step"]] == [7, 8]

    # Anew: what is there is set aside, in the bucket too.
    job = runner.write(copy_job(checkpoint={"uri": uri, "everySteps": 2}))
    runner.run("run", job, "--output", elsewhere, "--resume", "never", "--steps", "2")
    assert newest_step(state, runner.folder) == 2
    assert newest_step(f"{state}/earlier-1", runner.folder) == 6
    assert [json.loads(line)["step"] for line in (kept.read("metrics.jsonl") or b"").splitlines()] == [0, 1, 2]
    assert kept.read("earlier-1/metrics.jsonl") == (elsewhere / "earlier-1" / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(("environment", "code"), [({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, 75), ({}, 1)])
def test_a_bucket_that_cannot_be_used_is_named_before_anything_is_started(
    runner: Runner, object_store: Any, environment: dict[str, str], code: int
) -> None:
    job = runner.write(copy_job(checkpoint={"uri": "s3://no-such-bucket/runs"}))
    printed = runner.run("run", job, "--output", runner.folder / "output", expect=code, environment=environment)
    assert "rljob run: s3://no-such-bucket/runs/default/tiny-local: " in printed
    assert "check the address, the network and the credentials in the environment (on a cluster, in the" in printed
    assert "Traceback" not in printed
    assert "step" not in printed
