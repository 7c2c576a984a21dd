"""A job whose trainer's ranks compute layers together: it learns, through the death of a rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from real_runs import Runner, metrics_of, wait_for

from rljob_trainer.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo-70b-tensor"


def ranks_of(driver: int) -> list[int]:
    """The processes of the learner's ranks."""
    children = psutil.Process(driver).children(recursive=True)
    return [child.pid for child in children if any(part.startswith("ray::RankActor") for part in child.cmdline())]


@pytest.mark.slow(
    stands_for=[
        "tests/runs/test_run.py::test_a_run_leaves_everything_and_one_that_was_killed_thrice_leaves_the_same",
        "tests/trainer/learner/test_tensor.py::test_gradients_norms_and_steps_are_those_of_one_process",
    ]
)
def test_two_ranks_of_every_layer_learn_and_go_on_after_one_was_killed(runner: Runner) -> None:
    assert main(["validate", str(EXAMPLE / "grpo-70b.yaml")]) == 0
    output = runner.folder / "output"
    command = ("run", EXAMPLE / "tiny.yaml", "--output", output, "--steps", "20")
    process = runner.start(*command)
    wait_for(lambda: len(metrics_of(output)) > 6, process)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    printed, _ = process.communicate()
    assert process.returncode == 75, printed  # can be tried again
    assert "resuming from the checkpoint of step 5" in runner.run(*command)
    records = metrics_of(output)
    assert [record["step"] for record in records] == list(range(21))
    # Chance: a tenth of the digits.
    assert records[1]["reward/mean"] < 0.2
    assert sum(record["reward/mean"] for record in records[-3:]) / 3 > 0.3
    # What the engine says of its tokens is what the trainer says: each version reached it.
    assert max(record["mismatch/log_prob/max"] for record in records[1:]) < 1e-4
