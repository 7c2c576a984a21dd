"""Whole runs that must learn: from random weights to repeating two digits, bound by steps and not by seconds."""

from __future__ import annotations

from typing import Any

import pytest
from real_runs import Runner, metrics_of
from tiny_job import copy_job

TASK = {"type": "copy", "digits": 2, "size": 90}
LEARNING_RATE = 2e-3


@pytest.mark.parametrize(
    ("algorithm", "batch"),
    [
        pytest.param(
            {
                "preset": "grpo",
                "kl": {"inLoss": {"coefficient": 0}},
                "policyLoss": {"clipHigh": 0.28},
                "aggregation": "tokenMean",
                "entropyCoefficient": 0.01,
            },
            {"groups": 32, "samplesPerPrompt": 16, "miniBatchGroups": 8, "epochs": 2},
            id="grpo",
        ),
        pytest.param(
            {
                "preset": "ppo",
                "kl": {"inReward": {"coefficient": 0}},
                "advantage": {"lambda": 0.95},
                "entropyCoefficient": 0.01,
                "critic": {"learningRate": LEARNING_RATE},
            },
            {"groups": 256, "samplesPerPrompt": 1, "miniBatchGroups": 64, "epochs": 2},
            id="ppo with a critic",
        ),
    ],
)
def test_a_run_learns_to_repeat_two_digits(runner: Runner, algorithm: dict[str, Any], batch: dict[str, int]) -> None:
    job = copy_job(
        algorithm=algorithm,
        batch=batch,
        rollout={"engine": "torch", "maxResponseTokens": 3},
        trainer={"optimizer": {"learningRate": LEARNING_RATE}},
        validation={"atStart": False},
        checkpoint={"everySteps": 0},
        stop={"steps": 40},
    )
    job["spec"]["data"]["train"]["task"] = TASK
    job["spec"]["data"]["validation"][0] |= {"task": {"type": "copy", "digits": 2}, "limit": 100}
    output = runner.folder / "output"
    runner.run("run", runner.write(job), "--output", output)
    records = metrics_of(output)
    # Chance: a tenth of the digits, one problem in a hundred. Other processors round otherwise, which is another path:
    # over three seeds the digits end at 0.53 to 0.89, and 30 to 80 of a hundred problems are right.
    assert sum(r["reward/mean"] for r in records[-5:]) / 5 >= 0.4
    assert records[-1]["validation/held-out/mean@1"] >= 0.15
