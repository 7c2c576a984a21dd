"""A node is lost: its pods stay Terminating for ever, because no kubelet says that their containers have ended.

KubeRay counts such a pod and makes no other in its place. The operator removes it by force, once it is sure.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.bad_network import BadNetwork
from fakes.heads import Play
from world import SETTINGS, WITH_FAKE_AND_REAL_KUBERAY, Object, World, job_document

pytestmark = [pytest.mark.timeout(600), WITH_FAKE_AND_REAL_KUBERAY]

WAITS_FOR_THE_NODE = replace(SETTINGS, lost_node_seconds=3600)
GIVES_THE_NODE_UP = replace(SETTINGS, lost_node_seconds=0)


async def lose_node_of(world: World, pod: Object) -> None:
    """What happens to a pod whose node is gone, in the words of Kubernetes' controllers."""
    path = f"/api/v1/namespaces/{world.namespace}/pods/{pod['metadata']['name']}"
    target = {"apiVersion": "v1", "kind": "Node", "name": "lost"}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod["metadata"]["name"]}, "target": target}
    await world.call("POST", f"{path}/binding", binding)
    conditions = [
        {"type": "Ready", "status": "False"},
        {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"},
    ]
    await world.call("PATCH", f"{path}/status", {"status": {"conditions": conditions}}, "application/merge-patch+json")
    # Kubernetes grants the pod's own 30 s or more; nobody is there to use them.
    await world.call("DELETE", path, {"gracePeriodSeconds": 1})
    assert "deletionTimestamp" in (await world.call("GET", path))["metadata"]


def names_of(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


async def message_of(world: World, job: str, kind: str) -> str:
    conditions = (await world.job(job))["status"]["conditions"]
    return str(next(item["message"] for item in conditions if item["type"] == kind))


async def test_a_worker_on_a_lost_node_is_named_then_removed_by_force_and_replaced(world: World) -> None:
    world.start_operator(settings=WAITS_FOR_THE_NODE)
    await world.apply(job_document("bereft", rollout={"replicas": 3}), Play(steps=None))
    await world.until_condition("bereft", "ClusterReady", "True", "PoolsReady")
    await world.until_condition("bereft", "Running", "True", "Training")
    before = await world.pods("rollout")
    lost = before[0]
    await lose_node_of(world, lost)
    await world.until_condition("bereft", "ClusterReady", "True", "PoolDegraded")
    assert await message_of(world, "bereft", "ClusterReady") == "rollout: 1 of 3 pods waits"
    assert names_of(await world.pods("rollout")) == names_of(before)

    await world.stop_operator()
    world.start_operator(settings=GIVES_THE_NODE_UP)
    await world.until_condition("bereft", "ClusterReady", "True", "PoolsReady")
    after = names_of(await world.pods("rollout"))
    assert len(after) == 3
    assert names_of(before) - after == names_of([lost])
    assert len(world.drivers("bereft")) == 1


async def test_a_head_on_a_lost_node_is_gone_before_the_next_attempt(world: World, network: BadNetwork) -> None:
    world.start_operator(network.address, WAITS_FOR_THE_NODE)
    play = Play(steps=None)
    await world.apply(job_document("adrift"), play)
    await world.until_condition("adrift", "Running", "True", "Training")
    (lost,) = await world.pods("headgroup")
    await lose_node_of(world, lost)

    async def only_the_head_is_left() -> bool:
        said = await message_of(world, "adrift", "ClusterReady")
        return said == f"waiting for {lost['metadata']['name']} to end"

    await world.until("the job waits for nothing but the lost pod", only_the_head_is_left)
    assert (await world.clusters(), names_of(await world.pods())) == ([], names_of([lost]))
    assert len(world.drivers("adrift")) == 1

    await world.stop_operator()
    there: list[Object] = []

    def look_before_a_cluster_is_made(_number: int, method: str, path: str) -> None:
        if method == "POST" and path.endswith("/rayclusters"):
            there.extend(world.plane.call("GET", f"/api/v1/namespaces/{world.namespace}/pods")["items"])

    network.before = look_before_a_cluster_is_made
    play.steps = 2
    world.start_operator(network.address, GIVES_THE_NODE_UP)
    job = await world.until_condition("adrift", "Succeeded", "True")
    assert there == []
    first, second = job["status"]["attempts"]
    assert (first["reason"], first["counted"], first["incarnation"]) == ("HeadLost", False, 1)
    assert first["message"] == f"the head pod {lost['metadata']['name']} was evicted because of a taint of its node"
    assert (second["attempt"], second["incarnation"]) == (2, 2)


async def test_a_lost_worker_without_a_ready_successor_leaves_its_pool_degraded(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("thinned", rollout={"replicas": 3}), Play(steps=None))
    await world.until_condition("thinned", "ClusterReady", "True", "PoolsReady")
    await world.until_condition("thinned", "Running", "True", "Training")
    world.kubelet.becomes_ready = lambda _pod: {"phase": "Pending"}
    lost = (await world.pods("rollout"))[0]["metadata"]["name"]
    await world.call("DELETE", f"/api/v1/namespaces/{world.namespace}/pods/{lost}", {"gracePeriodSeconds": 0})
    await world.until_condition("thinned", "ClusterReady", "True", "PoolDegraded")
    assert await message_of(world, "thinned", "ClusterReady") == "rollout: 1 of 3 pods waits"
    world.kubelet.becomes_ready = lambda _pod: None
    await world.until_condition("thinned", "ClusterReady", "True", "PoolsReady")
    assert len(world.drivers("thinned")) == 1
