"""Real runs whose pi_old is interpolated (A-3PO): no forward pass before the update, weights made in the loss."""

from __future__ import annotations

from typing import Any

import pytest
from real_runs import Runner, metrics_of
from tiny_job import copy_job

from rljob_trainer.telemetry.names import check_all

pytestmark = pytest.mark.integrity


def run(runner: Runner, pipeline: dict[str, Any], **spec: Any) -> list[dict[str, Any]]:
    correction = {"mode": "decoupled", "proximal": "interpolated", "weights": {"level": "token", "high": 2.0}}
    algorithm = {"preset": "grpo", "kl": {"inLoss": {"coefficient": 0}}, "rolloutCorrection": correction}
    job = copy_job(algorithm=algorithm, pipeline=pipeline, validation={"atStart": False}, **spec)
    output = runner.folder / "output"
    runner.run("run", runner.write(job), "--output", output)
    records = metrics_of(output)
    check_all(name for r in records for name in r if "/" in name)
    # pi_old and its diagnostics would come from a forward pass of their own.
    assert not any(name.startswith(("timing/score", "rollout_correction")) for r in records for name in r)
    return records


def test_one_step_off_every_token_is_anchored_at_the_policy_that_sampled_it(runner: Runner) -> None:
    records = run(runner, {"mode": "oneStepOff"})
    assert [r["age/max"] for r in records] == [0, 1, 1, 1, 1, 1]
    # Age 1: alpha = 1, pi_old is pi_roll, and the importance weight of pi_old / pi_roll is 1.
    assert [r["actor/correction_weight"] for r in records[1:]] == [1.0] * 5
    assert all(r["drift/kl"] > 0 for r in records[1:])


@pytest.mark.slow(stands_for="test_one_step_off_every_token_is_anchored_at_the_policy_that_sampled_it")
def test_older_tokens_are_anchored_between_both_policies(runner: Runner) -> None:
    records = run(
        runner,
        {"mode": "fullyAsync", "staleness": {"maxAge": 3}},
        batch={"samplesPerPrompt": 4, "miniBatchGroups": 4},
        trainer={"optimizer": {"learningRate": 1e-2}},
        stop={"steps": 12},
    )
    old = [r for r in records if r["age/mean"] > 1]
    assert old
    assert all(0 < r["actor/correction_weight"] <= 2.0 for r in old)
    assert all(r["actor/correction_weight"] != 1.0 for r in old)
