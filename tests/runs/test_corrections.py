"""Both ways to deal with rollout log-probs, in every pipeline and under each answer to running requests: real runs.

One optimizer step per batch, so what pi_old is can be read off the ratio: decoupled takes the trainer's present
policy, whose ratio to itself is 1; bypass takes what the engine said when it sampled.
"""

from __future__ import annotations

from typing import Any

import pytest
from real_runs import Runner, metrics_of
from tiny_job import copy_job

PIPELINES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "one step off": {"mode": "oneStepOff"},
    "finish first": {"mode": "fullyAsync", "staleness": {"maxAge": 2}},
    "recompute": {"mode": "fullyAsync", "staleness": {"maxAge": 2}, "partialRollout": "recompute"},
    "keep cache": {"mode": "fullyAsync", "staleness": {"maxAge": 2}, "partialRollout": "keepCache"},
}
CORRECTIONS = ("bypass", "decoupled")


@pytest.mark.parametrize(
    ("name", "correction"),
    [
        # Where requests are ended by an update, what comes of the rest is the engine's matter and not the correction's.
        *((name, correction) for name in ("sync", "one step off", "keep cache") for correction in CORRECTIONS),
        ("finish first", "bypass"),
        ("recompute", "decoupled"),
    ],
)
def test_correction_works_in_every_mode(runner: Runner, name: str, correction: str) -> None:
    settings: dict[str, Any] = {"mode": correction}
    if correction == "decoupled":
        settings["weights"] = {"level": "token", "high": 2.0}
    job = copy_job(
        pipeline=PIPELINES[name],
        algorithm={"preset": "grpo", "kl": {"inLoss": {"coefficient": 0}}, "rolloutCorrection": settings},
        batch={"groups": 8, "samplesPerPrompt": 4, "miniBatchGroups": 8},
        trainer={"optimizer": {"learningRate": 1e-2}},
        validation={"atStart": False},
        checkpoint={"everySteps": 0},
    )
    output = runner.folder / "output"
    runner.run("run", runner.write(job), "--output", output)
    records = metrics_of(output)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    stale = [record for record in records if record["age/mean"] > 0]
    if name in ("sync", "one step off"):
        assert [record["age/max"] for record in records] == [0, *[int(name != "sync")] * 5]
    else:
        assert stale
        assert max(record["age/max"] for record in records) <= 2
    for record in records:
        fresh = record not in stale
        if correction == "decoupled":
            assert "timing/score_seconds" in record
            assert from_one(record, "actor/ratio") < 1e-5
            # The weight is pi_old / pi_roll.
            assert (from_one(record, "rollout_correction/weight") < 1e-3) == fresh
        else:
            assert "timing/score_seconds" not in record
            assert (from_one(record, "actor/ratio") < 1e-3) == fresh


def from_one(record: dict[str, Any], name: str) -> float:
    """How far the furthest token's ratio is from 1."""
    return float(max(record[f"{name}/max"] - 1, 1 - record[f"{name}/min"]))
