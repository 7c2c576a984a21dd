"""PPO with an actor and a critic that begin as one Gemma 2: the tiny twin learns, and vLLM samples what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_runs import Runner, metrics_of

from rljob_trainer.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "ppo-gemma"


@pytest.mark.slow(stands_for="tests/runs/test_learning.py::test_a_run_learns_to_repeat_two_digits")
def test_it_learns_to_repeat_two_digits(runner: Runner) -> None:
    assert main(["validate", str(EXAMPLE / "gemma-2-2b.yaml")]) == 0
    output = runner.folder / "output"
    runner.run("run", EXAMPLE / "tiny.yaml", "--output", output, "--steps", "80")
    records = metrics_of(output)
    assert records[-1]["step"] == 80
    # Chance: a tenth of the digits. An answer that does not end after its two digits has two thirds at most; of three
    # seeds the eightieth step has 0.43, 0.55 and 0.78.
    assert records[1]["reward/mean"] < 0.2
    assert sum(r["reward/mean"] for r in records[-5:]) / 5 >= 0.3
    assert all("critic/loss" in r for r in records[1:])
    # What the engine says of its tokens is what the trainer says.
    assert max(r["mismatch/log_prob/max"] for r in records[1:]) < 1e-4


@pytest.mark.slow(
    stands_for="tests/runs/test_vllm.py::test_requests_run_on_through_publications_and_the_engine_agrees_with_the_trainer"
)
@pytest.mark.vllm
def test_vllm_serves_each_version_that_is_trained(runner: Runner) -> None:
    output = runner.folder / "output"
    runner.run(
        "run", EXAMPLE / "tiny.yaml", "--output", output, "--steps", "2", "--set", "rollout.engine=vllm",
        "--set", "trainer.optimizer.learningRate=1e-2",
    )  # fmt: skip
    records = metrics_of(output)
    assert [r["step"] for r in records] == [0, 1, 2]
    for record in records[1:]:
        assert record["mismatch/log_prob/max"] < 1e-4
        assert record["mismatch/canary/max"] < 1e-4
