"""Pods, a node, operators and the API server are lost while jobs train: what starts anew, and that every prompt is
trained once."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest
from faults import kill_operator, run_out_of_memory, without_api_server, without_node
from ledger import assert_every_prompt_once
from resumes import assert_resumed
from undisturbed import assert_undisturbed, endless, identities
from world import COMPLETED, KUBERAY, ON_THE_WAY, RLJOB, TRAINING, World, story

pytestmark = pytest.mark.timeout(1500)
STEPS = 120
OUT_OF_MEMORY = "OOMKilled, exit code 137"


@pytest.mark.integrity
@pytest.mark.parametrize(
    ("role", "engines", "lost", "told", "incarnation"),
    [
        # One of two engines: the other makes its samples again, and a new one joins.
        ("rollout", 2, [], [TRAINING], 1),
        # Weights are lost: the next attempt goes on from the last checkpoint, on the same cluster.
        ("trainer", 1, ["DriverFailed"], [TRAINING, ("False", "BackingOff"), TRAINING], 1),
        # All that Ray knew is lost: a new cluster, the same checkpoint.
        ("head", 1, ["HeadLost"], [TRAINING, ("False", "HeadLost"), TRAINING], 2),
    ],
)
def test_training_survives_the_loss_of_a_pod(
    world: World, role: str, engines: int, lost: list[str], told: list[tuple[str, str]], incarnation: int
) -> None:
    """``lost``: why attempts ended; ``told``: what `Running` says until the job is completed."""
    name = f"loses-{role}"
    world.apply(
        world.job_document(
            name,
            rollout={"replicas": engines},
            stop={"steps": STEPS},
            validation={"every": STEPS, "atStart": False},
            retry={"backoffSeconds": 1},
        )
    )
    world.until_condition(name, "CheckpointAvailable", "True")
    pod, *_ = world.pods(name, role)
    with world.watching("rlj") as seen:
        world.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
        job = world.until_finished(name)
    assert story(seen, name, "Running", without=ON_THE_WAY) == [*told, COMPLETED]
    if incarnation > 1:
        ready = story(seen, name, "ClusterReady")
        assert ready[:2] == [("True", "PoolsReady"), ("False", "ReplacingCluster")]
        assert ready[-2:] == [("True", "PoolsReady"), ("False", "ClusterFreed")]
    assert _ends(job) == [*lost, "Completed"]
    assert job["status"]["incarnation"] == incarnation
    assert ("is lost" in world.driver_log(name, attempt=1)) == (role == "rollout")
    rows = assert_all_trained_once(world, name)
    if lost:
        assert_resumed(world, name, rows)


def test_a_container_that_runs_out_of_memory_while_it_trains_is_named_and_tried_again(world: World) -> None:
    name, seldom = "starved", 100
    world.apply(
        world.job_document(
            name,
            trainer={"pod": all_reserved(world)},
            # No second checkpoint before the second loss: with one, failures count from there.
            checkpoint={"everySteps": seldom},
            stop={"steps": 100 * seldom},
            validation={"every": 100 * seldom, "atStart": False},
            retry={"limit": 1, "backoffSeconds": 1},
        )
    )
    world.until_condition(name, "CheckpointAvailable", "True")
    starved = []
    for attempt in (1, 2):
        world.until(f"attempt {attempt} trains", lambda number=attempt: _trains(world, name, number))
        pod, *_ = world.pods(name, "trainer")
        starved.append(pod["metadata"]["name"])
        run_out_of_memory(world, starved[-1])
    failed = world.until_condition(name, "Failed", "True", "RetryLimitExceeded")
    assert f"{starved[1]}: {OUT_OF_MEMORY}" in failed["message"]
    status = world.get("rlj", name)["status"]
    first, second = status["attempts"]
    assert f"{starved[0]}: {OUT_OF_MEMORY}" in first["message"]
    assert (first["checkpointStep"], second["checkpointStep"], status["checkpoint"]["step"]) == (seldom,) * 3
    # What the second attempt did after the checkpoint it went on from is in no checkpoint.
    steps = [line["step"] for line in world.metrics(name)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= seldom
    assert_resumed(world, name, assert_every_prompt_once(world, name, seldom, may_be_open=True))


def all_reserved(world: World) -> dict[str, Any]:
    """Pod settings that reserve all the memory that the pod may have."""
    room = {"cpu": "1", "memory": "3Gi"}
    return world.pod() | {"resources": {"requests": room, "limits": room}}


def _trains(world: World, job: str, attempt: int) -> bool:
    running = world.get("rlj", job)["status"]["attempt"] == attempt
    return running and world.condition(job, "Running")["reason"] == "Training"


@pytest.mark.integrity
def test_training_survives_the_loss_of_a_node(world: World) -> None:
    name = "loses-node"
    # The head elsewhere: what is lost with it has a test of its own.
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_not_beside_the_head(name)]}}
    pod = world.pod() | {"affinity": apart}
    document = world.job_document(
        name,
        rollout={"pod": pod},
        trainer={"pod": pod},
        stop={"steps": STEPS},
        validation={"every": STEPS, "atStart": False},
        retry={"backoffSeconds": 1},
    )
    world.apply(document)
    world.until_condition(name, "CheckpointAvailable", "True")
    node = world.pods(name, "trainer")[0]["spec"]["nodeName"]
    with world.watching("rlj") as seen:
        with without_node(world, node):
            # Pods are given up half a minute after their node; until another has room for them the job waits.
            world.until("the lost pods are given up", lambda: node not in _nodes_of(world, name), seconds=240)
        job = world.until_finished(name)
    said = story(seen, name, "Running", without=ON_THE_WAY)
    assert said[:2] == [TRAINING, ("False", "BackingOff")]
    assert said[-2:] == [TRAINING, COMPLETED]
    assert len(_ends(job)) > 1
    assert job["status"]["incarnation"] == 1
    assert_resumed(world, name, assert_all_trained_once(world, name))


def test_training_goes_on_while_the_api_server_is_away(world: World) -> None:
    name = "unwatched"
    world.apply(endless(world, name))
    world.until_condition(name, "CheckpointAvailable", "True")
    pods, running = identities(world, name), world.condition(name, "Running")
    with without_api_server(world):
        away = time.time()
        time.sleep(20)
        back = time.time()
    world.until_step(name, world.step(name) + 5)
    assert identities(world, name) == pods
    # Nobody took the silence for an end: the condition is as old as it was.
    assert world.condition(name, "Running")["lastTransitionTime"] == running["lastTransitionTime"]
    assert_undisturbed(world, name)
    moments = [datetime.fromisoformat(line["time"]).timestamp() for line in world.metrics(name)]
    assert any(away < moment < back for moment in moments), "no step was done while the API server was away"


def test_a_killed_operator_goes_on_where_it_was(world: World) -> None:
    name = "unattended"
    world.apply(endless(world, name))
    with world.watching("rlj") as seen:
        # Once between creating the cluster and starting the driver, once while it trains.
        world.until("there is a RayCluster", lambda: bool(world.list("rayclusters")))
        kill_operator(world, RLJOB)
        world.until_condition(name, "CheckpointAvailable", "True")
        pods = identities(world, name)
        kill_operator(world, RLJOB)
        world.until_step(name, world.step(name) + 5)
        assert identities(world, name) == pods
    assert story(seen, name, "Running", without=ON_THE_WAY) == [TRAINING]
    assert_undisturbed(world, name)


def test_a_killed_kuberay_operator_is_not_missed(world: World) -> None:
    name = "untended"
    world.apply(endless(world, name))
    world.until_condition(name, "CheckpointAvailable", "True")
    pods = identities(world, name)
    with world.watching("rlj") as seen:
        kill_operator(world, KUBERAY)
        world.until_step(name, world.step(name) + 5)
        assert identities(world, name) == pods
    assert story(seen, name, "Running", without=ON_THE_WAY) == [TRAINING]
    assert_undisturbed(world, name)


def assert_all_trained_once(world: World, name: str, steps: int = STEPS) -> list[dict[str, Any]]:
    """Every step was done once, and every prompt trained once. Returns the rows of the ledger."""
    assert [line["step"] for line in world.metrics(name)] == list(range(1, steps + 1))
    return assert_every_prompt_once(world, name, steps)


def _ends(job: dict[str, Any]) -> list[str]:
    """Why each attempt ended."""
    return [attempt["reason"] for attempt in job["status"]["attempts"]]


def _not_beside_the_head(job: str) -> dict[str, object]:
    labels = {"rljob.dev/job": job, "rljob.dev/role": "head"}
    return {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}


def _nodes_of(world: World, job: str) -> set[str]:
    return {pod["spec"].get("nodeName", "") for pod in world.pods(job)}
