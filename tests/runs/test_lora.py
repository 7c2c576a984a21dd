"""Whole runs that train an adapter: they learn, are the same after a kill, and others read what they export."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from real_runs import Runner, metrics_of, wait_for
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rljob_trainer.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo-7b-lora-one-gpu"
FULLY_ASYNC = {
    "pipeline.mode": "fullyAsync",
    "pipeline.requireBatches": "2",
    "batch.groups": "null",
    "batch.miniBatchGroups": "16",
    "trainer.replicas": "2",
}


def assignments(changes: dict[str, str]) -> list[str]:
    return [part for path, value in changes.items() for part in ("--set", f"{path}={value}")]


@pytest.mark.slow(stands_for="[fullyAsync, two ranks]")
@pytest.mark.parametrize("changes", [{}, FULLY_ASYNC], ids=["sync", "fullyAsync, two ranks"])
def test_the_example_learns_and_leaves_the_model_as_it_was(runner: Runner, changes: dict[str, str]) -> None:
    assert main(["validate", str(EXAMPLE / "grpo-7b-lora.yaml")]) == 0
    output = runner.folder / "output"
    runner.run("run", EXAMPLE / "tiny.yaml", "--output", output, *assignments(changes))
    records = metrics_of(output)
    # Chance: a tenth of the digits, and the character after them.
    assert sum(record["reward/mean"] for record in records[-5:]) / 5 >= 0.4
    assert records[-1]["validation/held-out/score/mean@1"] >= 0.4
    # The reference is the model without its adapter: at first they are the same.
    assert next(record["kl/reference"] for record in records if "kl/reference" in record) < 1e-2
    assert records[-1]["kl/reference"] > 0.5
    assert max(record["mismatch/canary/max"] for record in records if "mismatch/canary/max" in record) < 1e-5
    merged, adapter = runner.folder / "merged", runner.folder / "adapter"
    assert main(["export", str(output), "--to", str(merged)]) == 0
    assert main(["export", str(output), "--to", str(adapter), "--adapter"]) == 0
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(output / "start"), adapter)
    by_peft, ours = theirs.merge_and_unload().state_dict(), load_file(merged / "model.safetensors")
    first = load_file(output / "start" / "model.safetensors")
    for name, tensor in ours.items():
        assert float((tensor - by_peft[name]).abs().max()) < 1e-6, name
        assert torch.equal(tensor, first[name]) != name.endswith("_proj.weight"), name


@pytest.mark.integrity
@pytest.mark.slow(
    stands_for="tests/runs/test_run.py::test_a_run_leaves_everything_and_one_that_was_killed_thrice_leaves_the_same"
)
def test_after_a_kill_it_is_what_it_would_have_been(runner: Runner) -> None:
    short = assignments({"stop.steps": "6", "checkpoint.everySteps": "2", "batch.groups": "8", "data.validation": "[]"})
    for name in ("whole", "killed"):
        output, arguments = runner.folder / name, (EXAMPLE / "tiny.yaml", "--output", runner.folder / name, *short)
        if name == "killed":
            process = runner.start("run", *arguments)
            wait_for(lambda: len(metrics_of(runner.folder / "killed")) > 3, process)
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        printed = runner.run("run", *arguments)
        assert ("resuming from the checkpoint of step" in printed) == (name == "killed")
        assert main(["export", str(output), "--to", str(runner.folder / f"{name}-adapter"), "--adapter"]) == 0
    whole, killed = (
        load_file(runner.folder / f"{name}-adapter" / "adapter_model.safetensors") for name in ("whole", "killed")
    )
    assert whole.keys() == killed.keys()
    assert all(torch.equal(killed[name], tensor) for name, tensor in whole.items())
    assert all(bool(tensor.any()) for tensor in whole.values())


@pytest.mark.integrity
@pytest.mark.slow(
    stands_for="tests/trainer/rollout/test_vllm_adapter.py::test_each_version_is_computed_with_its_own_adapter"
)
@pytest.mark.vllm
def test_vllm_is_sent_adapters_alone_after_a_resume_too(runner: Runner) -> None:
    changes = {"rollout.engine": "vllm", "model.lora.publish": "adapter", "data.validation": "[]"}
    output = runner.folder / "output"
    for steps in ("3", "5"):
        printed = runner.run("run", EXAMPLE / "tiny.yaml", "--output", output, "--steps", steps, *assignments(changes))
        assert ("resuming from the checkpoint of step 3" in printed) == (steps == "5")
    records = metrics_of(output)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    # Samples and canaries have the learner's log-probs after each version, and the policy is another one each time.
    assert max(record["mismatch/canary/max"] for record in records) < 1e-5
    assert max(record["mismatch/log_prob/max"] for record in records) < 1e-4
    distances = [record["kl/reference"] for record in records]
    assert distances[0] < 1e-6 < distances[1] < distances[4]
