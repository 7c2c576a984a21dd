"""Whole runs that must learn: from random weights to repeating digits, bound by steps and not by seconds."""

from __future__ import annotations

from typing import Any

import pytest
from real_runs import Runner, metrics_of
from tiny_job import copy_job

GRPO = {
    "preset": "grpo",
    "kl": {"inLoss": {"coefficient": 0}},
    "policyLoss": {"clipHigh": 0.28},
    "aggregation": "tokenMean",
    "entropyCoefficient": 0.01,
}
GROUPS = {"groups": 32, "samplesPerPrompt": 16, "miniBatchGroups": 8, "epochs": 2}


def learned(
    runner: Runner, algorithm: dict[str, Any], batch: dict[str, int], steps: int, *, digits: int, size: int, rate: float
) -> tuple[float, float]:
    """The share of right digits in the last five steps, and of problems that are right after them."""
    job = copy_job(
        algorithm=algorithm,
        batch=batch,
        rollout={"engine": "torch", "maxResponseTokens": digits + 1},
        trainer={"optimizer": {"learningRate": rate}},
        validation={"atStart": False},
        checkpoint={"everySteps": 0},
        stop={"steps": steps},
    )
    task = {"type": "copy", "digits": digits}
    job["spec"]["data"]["train"]["task"] = task | {"size": size}
    job["spec"]["data"]["validation"][0] |= {"task": task, "limit": 100}
    if digits > 2:
        job["spec"]["model"]["random"] |= {"hiddenSize": 128, "heads": 4}
    output = runner.folder / "output"
    runner.run("run", runner.write(job), "--output", output)
    records = metrics_of(output)
    return sum(r["reward/mean"] for r in records[-5:]) / 5, records[-1]["validation/held-out/mean@1"]


def test_a_run_learns_to_repeat_two_digits(runner: Runner) -> None:
    right_digits, right = learned(runner, GRPO, GROUPS, 40, digits=2, size=90, rate=2e-3)
    # Chance: a tenth of the digits, one problem in a hundred. Other processors round otherwise, which is another path:
    # over three seeds the digits end at 0.53 to 0.89, and 30 to 80 of a hundred problems are right.
    assert right_digits >= 0.4
    assert right >= 0.15


@pytest.mark.slow(stands_for="test_a_run_learns_to_repeat_two_digits")
@pytest.mark.parametrize(
    ("algorithm", "batch", "steps"),
    [
        pytest.param(GRPO, GROUPS, 80, id="grpo"),
        pytest.param(
            {
                "preset": "ppo",
                "kl": {"inReward": {"coefficient": 0}},
                "advantage": {"lambda": 0.95},
                "entropyCoefficient": 0.01,
                "critic": {"learningRate": 1e-3},
            },
            {"groups": 256, "samplesPerPrompt": 1, "miniBatchGroups": 64, "epochs": 2},
            55,
            id="ppo with a critic",
        ),
    ],
)
def test_a_run_learns_to_repeat_three_digits(
    runner: Runner, algorithm: dict[str, Any], batch: dict[str, int], steps: int
) -> None:
    right_digits, right = learned(runner, algorithm, batch, steps, digits=3, size=800, rate=1e-3)
    # Chance: a tenth of the digits, one problem in a thousand. Other processors round otherwise, which is another path:
    # over four seeds the digits end at 0.90 to 0.92, and 61 to 82 of a hundred problems are right.
    assert right_digits >= 0.8
    assert right >= 0.5
