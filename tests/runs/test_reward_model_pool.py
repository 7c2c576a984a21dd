"""A pool of reward models on a real Ray cluster that has a node for each pod: it grows, loses a replica and shrinks.
No sample has a score that is not the model's."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import pytest
from ray_nodes import ray_nodes
from real_runs import Runner, metrics_of, wait_for
from reward_models import alone, made
from scoring_pools import SeenPool, unhurried
from test_drive import Attempts

from rljob_api import cluster

DIGITS = "0123456789=\n"


def assert_scores_are_the_models(output: Path, model: Path) -> int:
    """Of every sample of every step on record; returns how many there are."""
    known: dict[str, float] = {}
    rows = [json.loads(line) for file in (output / "samples").iterdir() for line in file.read_text().splitlines()]
    for row in rows:
        text = row["prompt"] + row["response"]
        if text not in known:
            known[text] = alone(model, text, characters=DIGITS)
        # The same row alone and among others is rounded otherwise: 1.02e-5 was seen.
        assert row["score"] == pytest.approx(known[text], abs=3e-5), row
    return len(rows)


def test_a_pool_grows_loses_a_replica_and_shrinks_while_training_goes_on(runner: Runner, forked_workers: str) -> None:
    model = made(runner.folder / "mnt" / "claim" / "reward-model", characters=DIGITS)
    with ray_nodes() as nodes:
        for pod, role in (("trainer-a", cluster.TRAINER), ("rollout-a", cluster.ROLLOUT)):
            nodes.add(pod, role)
        nodes.add("scorer-a", cluster.REWARD_MODEL)
        attempts = Attempts(
            runner,
            nodes,
            placement="separate",
            pipeline={"mode": "fullyAsync", "staleness": {"maxAge": 2}, "partialRollout": "recompute"},
            batch={"samplesPerPrompt": 4, "miniBatchGroups": 4},
            reward={
                "functions": [
                    {"type": "rewardModel", "rewardModel": {"source": "pvc://claim/reward-model"}},
                    unhurried(runner.folder),
                ],
            },
            rewardModel={"replicas": 1},
            validation={"atStart": False},
            logging={"tensorboard": False, "samplesEvery": 1, "samplesPerWrite": 10_000},
            stop={"steps": 100_000},
        )
        attempts.mount(generation=1)
        client, output = attempts.client, attempts.output
        pool = SeenPool(client, "reward_model")
        run = attempts.start(attempt=1, generation=1)
        wait_for(client.answers, run)
        wait_for(lambda: client.status().step >= 2, run)
        assert set(pool.serving) == {"scorer-a"}

        # One more is wanted before its pod is there.
        client.tell(generation=2, attempt=1, reward_model_replicas=2)
        wait_for(lambda: "starting" in [replica.state for replica in pool.status.replicas], run)
        nodes.add("scorer-b", cluster.REWARD_MODEL)
        wait_for(lambda: set(pool.serving) == {"scorer-a", "scorer-b"}, run)

        # All stand still, with samples in hand, and that is told; one of them dies with its samples.
        pods = {pod: nodes.actors(pod) for pod in ("scorer-a", "scorer-b")}
        assert all(pods.values()), pods
        for process in itertools.chain(*pods.values()):
            os.kill(process, signal.SIGSTOP)
        wait_for(lambda: all(replica.running for replica in pool.serving.values()), run)
        wait_for(lambda: pool.waits.startswith("2 of 2 replicas to score "), run)
        assert 'rljob_reward_models{job="tiny",namespace="team",state="serving"} 2' in client.call("/metrics")
        for process in pods["scorer-a"]:
            os.kill(process, signal.SIGKILL)
        for process in pods["scorer-b"]:
            os.kill(process, signal.SIGCONT)
        step = client.status().step
        wait_for(lambda: client.status().step >= step + 2 and len(pool.serving) == 2, run)

        client.tell(generation=3, attempt=1, reward_model_replicas=1)
        wait_for(lambda: bool(pool.safe_to_delete), run)
        (drained,) = pool.safe_to_delete
        assert drained is not None
        assert set(pool.serving) == {"scorer-a", "scorer-b"} - {drained}
        nodes.remove(drained)
        step = client.status().step
        wait_for(lambda: client.status().step >= step + 2, run)

        client.tell(generation=4, attempt=1, suspend=True)
        printed, _ = run.communicate(timeout=300)
        assert run.returncode == 75, printed
    steps = metrics_of(output)
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    assert {record["reward/error_ratio"] for record in steps} == {0.0}
    assert sum(record["reward_model/rewardModel/losses"] for record in steps) >= 1
    assert assert_scores_are_the_models(output, model) == 16 * len(steps)
