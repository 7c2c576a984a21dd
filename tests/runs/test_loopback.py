"""A run on one machine can be reached from that machine alone: Ray and torch run or believe what they are sent."""

from __future__ import annotations

from listening import listening
from real_runs import Runner, metrics_of, wait_for
from tiny_job import copy_job


def test_a_run_listens_on_the_loopback_device_alone(runner: Runner) -> None:
    """Two ranks and an engine of its own, which meet, publish weights and sample; and the driver's status."""
    job = copy_job(placement="separate", trainer={"replicas": 2}, rollout={"engine": "torch", "maxResponseTokens": 3})
    job["spec"]["stop"] = {"steps": 1_000_000}
    output = runner.folder / "run"
    process = runner.start("run", runner.write(job), "--output", output, "--status-port", "0")
    wait_for(lambda: len(metrics_of(output)) > 2, process)
    assert {address for address, _ in listening(process.pid)} == {"127.0.0.1"}
