"""Pods, a node and the API server are lost while jobs train: what starts anew, and that every step is done once."""

from __future__ import annotations

import time

import pytest
from faults import without_api_server, without_node
from world import World

pytestmark = pytest.mark.timeout(1500)
STEPS = 120


@pytest.mark.parametrize(
    ("role", "engines", "attempts", "incarnation"),
    [
        # One of two engines: the other makes its samples again, and a new one joins.
        ("rollout", 2, 1, 1),
        # Weights are lost: the next attempt goes on from the last checkpoint, on the same cluster.
        pytest.param("trainer", 1, 2, 1, marks=pytest.mark.smoke),
        # All that Ray knew is lost: a new cluster, the same checkpoint.
        ("head", 1, 2, 2),
    ],
)
def test_training_survives_the_loss_of_a_pod(
    world: World, role: str, engines: int, attempts: int, incarnation: int
) -> None:
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
    world.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
    job = world.until_finished(name)
    assert len(job["status"]["attempts"]) == attempts
    assert job["status"]["incarnation"] == incarnation
    assert [line["step"] for line in world.metrics(name)] == list(range(1, STEPS + 1))


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
    with without_node(world, node):
        # Pods are given up half a minute after their node; until another has room for them the job waits.
        world.until("the lost pods are given up", lambda: node not in _nodes_of(world, name), seconds=240)
    job = world.until_finished(name)
    assert len(job["status"]["attempts"]) > 1
    assert job["status"]["incarnation"] == 1
    assert [line["step"] for line in world.metrics(name)] == list(range(1, STEPS + 1))


def test_training_goes_on_while_the_api_server_is_away(world: World) -> None:
    name = "unwatched"
    world.apply(world.job_document(name, stop={"steps": STEPS}, validation={"every": STEPS, "atStart": False}))
    world.until_condition(name, "CheckpointAvailable", "True")
    with without_api_server(world):
        time.sleep(20)
    job = world.until_finished(name)
    assert len(job["status"]["attempts"]) == 1
    assert [line["step"] for line in world.metrics(name)] == list(range(1, STEPS + 1))


def _not_beside_the_head(job: str) -> dict[str, object]:
    labels = {"rljob.dev/job": job, "rljob.dev/role": "head"}
    return {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}


def _nodes_of(world: World, job: str) -> set[str]:
    return {pod["spec"].get("nodeName", "") for pod in world.pods(job)}
