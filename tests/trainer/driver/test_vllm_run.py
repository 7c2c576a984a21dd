"""`rljob run` with vLLM engines whose requests run on through publications."""

from __future__ import annotations

import pytest
from real_runs import Runner, copy_job, metrics_of

pytestmark = pytest.mark.vllm


def test_requests_run_on_through_publications_and_the_engine_agrees_with_the_trainer(runner: Runner) -> None:
    job = copy_job(
        batch={"samplesPerPrompt": 4, "miniBatchGroups": 2},
        pipeline={"mode": "fullyAsync", "staleness": {"maxAge": 3}, "partialRollout": "keepCache"},
        rollout={"engine": "vllm", "maxResponseTokens": 48, "maxConcurrent": 6},
        validation={"atStart": False},
        stop={"steps": 6},
    )
    job["spec"]["model"]["random"]["contextLength"] = 64
    output = runner.folder / "output"
    runner.run("run", runner.write(job), "--output", output)
    records = metrics_of(output)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert max(record["age/max"] for record in records) <= 3
    # Samples of two versions, and after every publication the same log-probs in engine and trainer.
    assert max(record["age/mixed_ratio"] for record in records) > 0
    distances = [record["mismatch/canary/max"] for record in records]
    assert len(distances) == 6
    assert max(distances) < 1e-3
