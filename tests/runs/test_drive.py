"""`rljob drive` as the operator starts it, on a real Ray cluster with a labelled node for each pod, whose workers are
forked (``warm_workers``)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from driver_client import TOKEN, Client
from ray_nodes import RayNodes, ray_nodes
from real_runs import Process, Runner, free_port, metrics_of, wait_for
from tiny_job import copy_job
from warm import Forked

from rljob_api import cluster
from rljob_api.status import ReplicaStatus
from rljob_operator.entrypoint import driver_command
from rljob_operator.head import LINES
from rljob_trainer.commands.places import SCRATCH
from rljob_trainer.storage.bucket import ObjectBucket


class Attempts:
    """Starts drivers of one job as Ray's job supervisor would."""

    def __init__(self, runner: Runner, nodes: RayNodes, uri: str = "pvc://claim/runs", **spec: Any) -> None:
        self.folder, self._runner, self._nodes = runner.folder, runner, nodes
        self.storage = runner.folder / "mnt"
        # Drivers leave their ledger on the machine, as on the node of a head pod.
        self.uid = f"uid-{uuid4().hex[:8]}"
        self.own = f"team/tiny-{self.uid}"
        self.on_head = [SCRATCH / f"tiny-{self.uid}", SCRATCH / self.own]
        for folder in self.on_head:
            runner.leaves(folder)
        self.output = self.storage / "claim" / "runs" / self.own
        self.log = runner.folder / "head.log"
        self.client = Client(free_port())
        job = copy_job(**spec)
        job["metadata"] = {"name": "tiny", "namespace": "team"}
        job["spec"]["checkpoint"] = {"uri": uri, "everySteps": 0}
        self._job = job
        (self.folder / "token").write_text(TOKEN)

    def mount(self, generation: int, **spec: Any) -> None:
        self._job["spec"].update(spec)
        self._job["metadata"]["annotations"] = {cluster.GENERATION_ANNOTATION: str(generation)}
        (self.folder / "job.json").write_text(json.dumps(self._job))

    def start(self, attempt: int, generation: int) -> Process | Forked:
        environment = {
            "RAY_ADDRESS": self._nodes.address,
            "RLJOB_NAMESPACE": "team",
            "RLJOB_NAME": "tiny",
            "RLJOB_UID": self.uid,
        }
        # The operator's own command, with its paths and the port moved to where this test has them.
        verb, drive, _, *rest = driver_command(attempt, generation).split()
        assert (verb, drive) == ("rljob", "drive")
        options = dict(zip(rest[::2], rest[1::2], strict=True))
        options |= {"--token-file": str(self.folder / "token"), "--mirror-log": str(self.log)}
        options |= {"--port": str(self.client.port), "--host": "127.0.0.1", "--storage": str(self.storage)}
        arguments = [part for option in options.items() for part in option]
        return self._runner.start("drive", self.folder / "job.json", *arguments, environment=environment)


def engines_of(client: Client) -> dict[str, ReplicaStatus]:
    return {engine.name: engine for engine in client.status().pools.rollout.engines}


def states(client: Client) -> list[str]:
    return sorted(engine.state for engine in engines_of(client).values())


def test_a_job_is_scaled_up_and_down_suspended_and_resumed(runner: Runner, forked_workers: str) -> None:
    with ray_nodes() as nodes:
        nodes.add("trainer-a", cluster.TRAINER)
        nodes.add("rollout-a", cluster.ROLLOUT)
        attempts = Attempts(
            runner,
            nodes,
            placement="separate",
            pipeline={"mode": "fullyAsync", "staleness": {"maxAge": 1}, "partialRollout": "recompute"},
            batch={"samplesPerPrompt": 4, "miniBatchGroups": 4},
            validation={"atStart": False},
            stop={"steps": 100_000},
        )
        attempts.mount(generation=1)
        client, output = attempts.client, attempts.output
        first = attempts.start(attempt=1, generation=1)
        wait_for(client.answers, first)
        wait_for(lambda: client.status().step >= 2, first)
        (engine,) = engines_of(client).values()
        assert engine.pod == "rollout-a"

        # One more engine is wanted before its pod is there.
        assert client.tell(generation=2, attempt=1, rollout_replicas=2).generation == 2
        wait_for(lambda: "starting" in states(client), first)
        nodes.add("rollout-b", cluster.ROLLOUT)
        wait_for(lambda: client.status().pools.rollout.ready == 2, first)
        assert {engine.pod for engine in engines_of(client).values()} == {"rollout-a", "rollout-b"}
        assert not any(engine.safe_to_delete for engine in engines_of(client).values())

        client.tell(generation=3, attempt=1, rollout_replicas=1)
        wait_for(lambda: states(client) in (["drained", "serving"], ["drained", "paused"]), first)
        (drained,) = (engine for engine in engines_of(client).values() if engine.safe_to_delete)
        assert drained.pod == "rollout-b"
        step = client.status().step
        nodes.remove("rollout-b")
        wait_for(lambda: client.status().step >= step + 2, first)

        client.tell(generation=4, attempt=1, suspend=True)
        printed, _ = first.communicate(timeout=120)
        assert first.returncode == 75, printed
        done = metrics_of(output)[-1]["step"]
        assert f"suspended: suspended at step {done}" in attempts.log.read_text()
        assert f"suspended: suspended at step {done}" in (output / "logs" / "attempt-1.log").read_text()
        assert (output / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists()
        place = f"pvc://claim/runs/{attempts.own}"
        summary = json.loads((output / "summary.json").read_text())
        assert summary["checkpoint"] == f"{place}/checkpoints/step-{done:08d}"
        assert summary["report"] == f"{place}/report.html"
        status = json.loads((output / "status.json").read_text())
        assert status["checkpoint"]["uri"] == summary["checkpoint"]

        attempts.mount(generation=5, stop={"steps": done + 2})
        second = attempts.start(attempt=2, generation=5)
        printed, _ = second.communicate(timeout=300)
        assert second.returncode == 0, printed
        # Where the operator looks for it: in the last lines of the Ray job's log.
        assert any(line.startswith(cluster.DRIVE_FINISHED) for line in printed.splitlines()[-LINES:]), printed
        assert f"resuming from the checkpoint of step {done}" in printed
        records = metrics_of(output)
        assert [r["step"] for r in records] == list(range(1, done + 3))
        assert max(r["age/max"] for r in records) <= 1


@pytest.mark.slow(
    stands_for="tests/runs/test_buckets.py::test_killed_here_it_goes_on_elsewhere_as_if_nothing_had_happened"
)
def test_a_job_whose_state_is_in_a_bucket_goes_on_where_nothing_of_it_is_left(
    runner: Runner, object_store: Any, forked_workers: str
) -> None:
    uri = object_store.place()
    with ray_nodes() as nodes:
        nodes.add("trainer-a", cluster.TRAINER)
        nodes.add("rollout-a", cluster.ROLLOUT)
        attempts = Attempts(
            runner, nodes, uri, placement="separate", validation={"atStart": False}, stop={"steps": 100_000}
        )
        attempts.mount(generation=1)
        client, state = attempts.client, ObjectBucket(f"{uri}/{attempts.own}")
        first = attempts.start(attempt=1, generation=1)
        wait_for(client.answers, first)
        wait_for(lambda: client.status().step >= 2, first)
        client.tell(generation=2, attempt=1, suspend=True)
        printed, _ = first.communicate(timeout=120)
        assert first.returncode == 75, printed
        done = metrics_of(attempts.on_head[1])[-1]["step"]
        kept = list(state.files())
        assert {"job.yaml", "metrics.jsonl", "report.html", "summary.json", "logs/attempt-1.log"} <= set(kept)
        assert any(name.startswith(f"checkpoints/step-{done:08d}-") and name.endswith("manifest.json") for name in kept)

        for folder in attempts.on_head:  # another head pod
            shutil.rmtree(folder)
        attempts.mount(generation=3, stop={"steps": done + 2})
        second = attempts.start(attempt=2, generation=3)
        printed, _ = second.communicate(timeout=300)
        assert second.returncode == 0, printed
        assert f"resuming from the checkpoint of step {done}" in printed
        assert f"report: {state}/report.html" in printed
        assert [r["step"] for r in metrics_of(attempts.on_head[1])] == list(range(1, done + 3))
        assert f"suspended at step {done}" in (state.read("logs/attempt-1.log") or b"").decode()

        other = attempts.start(attempt=1, generation=3)
        printed, _ = other.communicate(timeout=120)
        assert other.returncode == 75, printed
        assert "attempt 2 has taken over" in printed


@pytest.mark.parametrize(
    ("changes", "address", "expected"),
    [
        ({"checkpoint": {"uri": "ftp://bucket/x"}}, True, "spec.checkpoint.uri"),
        ({}, False, "(RAY_ADDRESS is not set); use rljob run instead"),
        ({"batch": {"groups": -1}}, True, "spec.batch.groups"),
    ],
)
def test_what_cannot_be_driven_ends_with_64_and_is_mirrored(
    tmp_path: Path, changes: dict[str, Any], address: bool, expected: str
) -> None:
    job = copy_job(**changes)
    job["metadata"]["annotations"] = {cluster.GENERATION_ANNOTATION: "1"}
    (tmp_path / "job.json").write_text(json.dumps(job))
    (tmp_path / "token").write_text(TOKEN)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    if address:
        environment["RAY_ADDRESS"] = "127.0.0.1:1"
    command = [sys.executable, "-m", "rljob_trainer.cli", "drive", "job.json", "--attempt", "1", "--generation", "1"]
    command += ["--token-file", "token", "--mirror-log", "mirror"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 64, ended.stderr
    assert expected in ended.stderr
    assert expected in (tmp_path / "mirror").read_text()
