"""A real run whose trainer has another backend, which is named ``module:Class`` and lies beside the job file."""

from __future__ import annotations

import shutil

import pipeline_backend
import pytest
import torch
from real_runs import Runner, metrics_of
from safetensors.torch import load_file
from tiny_job import copy_job

SAME = ("actor/policy_loss", "actor/grad_norm", "actor/entropy", "reward/mean")


@pytest.mark.slow(stands_for="tests/trainer/learner/test_backends.py::test_stages_have_the_gradient_of_one_rank")
def test_a_run_with_stages_is_the_run_of_one_rank(runner: Runner) -> None:
    """Four ranks of which two return outputs, through the same driver: the same samples, losses and weights."""
    shutil.copy(pipeline_backend.__file__, runner.folder / "stages.py")
    common = {"placement": "separate", "validation": {"atStart": False}, "stop": {"steps": 3}}
    optimizer = {"learningRate": 1e-3}
    trainers = {
        "plain": {"optimizer": optimizer},
        "stages": {"optimizer": optimizer, "backend": "stages:Pipeline", "replicas": 4, "microBatchTokens": 64},
    }
    records, weights = {}, {}
    for name, trainer in trainers.items():
        job, output = copy_job(**common, trainer=trainer), runner.folder / name
        job["spec"]["model"]["random"]["tieEmbeddings"] = False
        runner.run("run", runner.write(job, f"{name}.yaml"), "--output", output)
        records[name] = metrics_of(output)
        # By one rank of fsdp2, whoever has written the checkpoint.
        runner.run("export", output, "--to", runner.folder / f"exported-{name}")
        weights[name] = load_file(runner.folder / f"exported-{name}" / "model.safetensors")
    assert len(records["stages"]) == len(records["plain"]) == 3
    for ours, theirs in zip(records["plain"], records["stages"], strict=True):
        for name in SAME:
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-6), name
        assert theirs["mismatch/canary/max"] < 1e-4, "engines have the weights that stages have put together"
    for name, tensor in weights["plain"].items():
        torch.testing.assert_close(weights["stages"][name], tensor, rtol=0, atol=1e-5)
