"""A real run that is watched and steered over HTTP, and what its folder says during it and afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from driver_client import TOKEN, Client
from real_runs import Runner, free_port, metrics_of, wait_for
from tiny_job import copy_job

from rljob_api.spec.pipeline import LiveSettings
from rljob_api.status import DriverStatus


def test_a_run_is_watched_changed_suspended_and_resumed(runner: Runner) -> None:
    changes: dict[str, Any] = {
        "pipeline": {"mode": "fullyAsync", "staleness": {"maxAge": 1}},
        "batch": {"samplesPerPrompt": 4, "miniBatchGroups": 4},
        # pi_old of a version's second pull is scored with the first one's weights, also where there was none before.
        "algorithm": {"preset": "grpo", "rolloutCorrection": {"mode": "decoupled"}},
        "checkpoint": {"everySteps": 0},
        "stop": {"steps": 100_000},
    }
    job, output, port = runner.write(copy_job(**changes)), runner.folder / "output", free_port()
    token = runner.folder / "token"
    token.write_text(f"{TOKEN}\n")
    serve = ("--status-port", str(port), "--token-file", token)
    process = runner.start("run", job, "--output", output, *serve)
    client = Client(port)
    wait_for(client.answers, process)
    first = client.status()
    assert (first.step, first.attempt, first.end) == (0, 1, None)
    wait_for(lambda: client.status().step >= 3, process)

    status = client.status()
    (engine,) = status.pools.rollout.engines
    assert (engine.name, engine.state in ("serving", "paused")) == ("0", True)
    assert engine.doing
    assert status.doing.startswith(("trainer waits for ", "the trainer "))
    assert abs(sum(status.shares.values()) - 1) < 1e-6
    assert status.throughput is not None
    assert status.ages is not None
    assert status.ages.bound == 1
    assert "rljob_reward_mean{" in client.call("/metrics")
    printed = runner.run("status", client.address, "--token-file", token)
    assert "engine 0 in " in printed
    assert "last 10 minutes: " in printed
    refused = runner.run("status", client.address, expect=1)
    assert "401" in refused

    told = client.tell(generation=1, attempt=1, settings=LiveSettings(max_age=2, sync_every=2))
    assert told.generation == 1
    wait_for(lambda: any(r.get("progress/groups", 0) and r["age/max"] == 2 for r in metrics_of(output)), process)
    assert client.status().ages.bound == 2  # type: ignore[union-attr]
    groups = [int(r["progress/groups"]) for r in metrics_of(output) if r["step"] > 0]
    assert groups[0] == 4
    assert groups[-1] - groups[-2] == 8

    client.tell(generation=2, attempt=1, suspend=True)
    printed_by_run, _ = process.communicate(timeout=120)
    assert process.returncode == 75, printed_by_run
    done = metrics_of(output)[-1]["step"]
    assert (output / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists()
    left = DriverStatus.model_validate_json((output / "status.json").read_text())
    assert left.end is not None
    assert (left.end.kind, left.end.exit_code) == ("suspended", 75)
    assert "the run has ended: suspended" in runner.run("status", output)
    assert json.loads(runner.run("status", output, "--json"))["step"] == done

    runner.run("run", job, "--output", output, "--steps", str(done + 1))
    assert [r["step"] for r in metrics_of(output)] == list(range(done + 2))


def test_a_folder_without_a_run_is_named(runner: Runner) -> None:
    printed = runner.run("status", runner.folder / "nothing", expect=1)
    assert "is " in printed
    assert str(Path("nothing") / "status.json") in printed
