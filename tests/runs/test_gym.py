"""Whole runs over problems of reasoning-gym, with the real package."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from gym_environment import gym_python
from real_runs import Runner, metrics_of, wait_for
from safetensors.torch import load_file
from sandbox_places import why_not

from rljob_trainer.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "reasoning-gym"
SMALL = {"batch.groups": "4", "batch.miniBatchGroups": "4"}


def arguments_of(changes: dict[str, str]) -> list[str]:
    python = gym_python()
    places = {f"data.{at}.task.python": python for at in ("train", "validation[0]")}
    return [part for path, value in {**places, **changes}.items() for part in ("--set", f"{path}={value}")]


@pytest.fixture
def contained() -> None:
    if reason := why_not("landlock"):
        pytest.skip(reason)


def test_the_example_scores_and_validates(runner: Runner, contained: None) -> None:
    """Its first steps. That it goes on after a kill is shown below."""
    output = runner.folder / "output"
    runner.run("run", EXAMPLE / "tiny.yaml", "--output", output, "--steps", "2", *arguments_of(SMALL))
    records = metrics_of(output)
    assert records[-1]["step"] == 2
    # The whole response is the answer, and random weights say something; a wrong answer that has the right one within
    # scores a part in this task.
    assert all(0 <= record["reward/mean"] < 0.5 for record in records if "reward/mean" in record)
    assert "validation/held-out/score/mean@1" in records[-1]


@pytest.mark.integrity
@pytest.mark.slow(
    stands_for=[
        "test_the_example_scores_and_validates",
        "tests/runs/test_kills.py::test_sync_ends_as_if_nothing_had_happened",
    ]
)
def test_the_example_is_the_same_after_a_kill(runner: Runner, contained: None) -> None:
    assert main(["validate", str(EXAMPLE / "grpo-1.5b.yaml")]) == 0
    short = arguments_of({"stop.steps": "6", "checkpoint.everySteps": "2", **SMALL})
    for name in ("whole", "killed"):
        arguments = (EXAMPLE / "tiny.yaml", "--output", runner.folder / name, *short)
        if name == "killed":
            process = runner.start("run", *arguments)
            wait_for(lambda: len(metrics_of(runner.folder / "killed")) > 3, process)
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        printed = runner.run("run", *arguments)
        assert ("resuming from the checkpoint of step" in printed) == (name == "killed")
        assert main(["export", str(runner.folder / name), "--to", str(runner.folder / f"{name}-model")]) == 0
    whole, killed = (load_file(runner.folder / f"{name}-model" / "model.safetensors") for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert all(torch.equal(killed[name], tensor) for name, tensor in whole.items())
    assert metrics_of(runner.folder / "whole")[-1]["step"] == 6


@pytest.mark.slow(
    stands_for=[
        "tests/trainer/test_gym.py::test_what_the_package_does_not_know_is_named",
        "tests/trainer/test_gym.py::test_a_python_without_the_package_says_how_to_install_it",
    ]
)
def test_a_task_that_there_is_not_is_refused_before_anything_starts(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = arguments_of({"data.train.task.name": "chain_sun"})
    printed = runner.run("run", EXAMPLE / "tiny.yaml", "--output", runner.folder / "output", *changed, expect=64)
    assert "spec.data.train.task.name: reasoning-gym has no task 'chain_sun'; did you mean chain_sum?" in printed
    assert not (runner.folder / "output" / "metrics.jsonl").exists()
    missing = ("--set", "data.train.task.python=null", "--set", "data.validation=[]")
    assert main(["validate", str(EXAMPLE / "tiny.yaml"), *missing]) == 64
    assert "pip install reasoning-gym==0.1.25" in "".join(capsys.readouterr())
