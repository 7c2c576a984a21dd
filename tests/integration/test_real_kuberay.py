"""KubeRay's own operator instead of the fake: what the fake claims about it holds.

`test_life_cycle.py` and `test_node_loss.py` run with both.

RLJOB_KUBERAY_CHAOS_RUNS says how many jobs walk by chance beside it, RLJOB_CHAOS_SEED where their seeds begin.
"""

from __future__ import annotations

import os

import pytest
from chaos import walk_all
from conformance import conforms
from fakes.bad_network import BadNetwork
from fakes.heads import Play
from world import WITH_REAL_KUBERAY, World, job_document

pytestmark = [pytest.mark.timeout(3600), WITH_REAL_KUBERAY]

RUNS = int(os.environ.get("RLJOB_KUBERAY_CHAOS_RUNS", "10"))
FIRST = int(os.environ.get("RLJOB_CHAOS_SEED", "1"))


async def pods_of(world: World, group: str) -> set[str]:
    return {
        pod["metadata"]["name"]
        for pod in await world.pods(group)
        if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running"
    }


async def test_a_job_lives_through_scaling_suspension_and_retry_with_the_real_kuberay(world: World) -> None:
    world.start_operator()
    play = Play(steps=None, exits={1: 1}, drains=False)
    await world.apply(job_document("genuine", rollout={"replicas": 3}), play)
    await world.until("attempt 2 runs", lambda: any(driver.attempt == 2 for driver in world.drivers("genuine")))
    await world.until_condition("genuine", "ClusterReady", "True", "PoolsReady")
    before = await pods_of(world, "rollout")
    assert len(before) == 3

    await world.patch("genuine", {"rollout": {"replicas": 1}})
    await world.until_condition("genuine", "Resizing", "True", "Draining")
    play.drains = True

    async def one_is_left() -> bool:
        return len(await pods_of(world, "rollout")) == 1

    await world.until("one engine is left", one_is_left)
    driver = world.drivers("genuine")[-1]
    assert await pods_of(world, "rollout") == before - driver.drained

    await world.patch("genuine", {"rollout": {"replicas": 2}})
    await world.until_condition("genuine", "Resizing", "False", "AtSize")
    assert len(await pods_of(world, "rollout")) == 2

    await world.patch("genuine", {"suspend": True})
    await world.until_condition("genuine", "Suspended", "True")
    assert (await world.clusters(), await world.pods()) == ([], [])
    await world.patch("genuine", {"suspend": False})
    play.steps = 2
    job = await world.until_condition("genuine", "Succeeded", "True")
    assert [(item["attempt"], item["incarnation"]) for item in job["status"]["attempts"]] == [(1, 1), (2, 1), (3, 2)]


async def test_kuberay_accepts_what_is_created_without_a_warning(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("clean"), Play(steps=None))
    await world.until_condition("clean", "Running", "True", "Training")
    events = (await world.call("GET", f"/api/v1/namespaces/{world.namespace}/events"))["items"]
    complaints = [
        item["message"]
        for item in events
        if item["type"] == "Warning" and item["involvedObject"]["kind"] == "RayCluster"
    ]
    assert complaints == []
    secrets = (await world.call("GET", f"/api/v1/namespaces/{world.namespace}/secrets"))["items"]
    # KubeRay makes a token of its own when it finds none; it has found ours.
    assert [item["metadata"]["labels"]["rljob.dev/job"] for item in secrets] == ["clean"]
    assert secrets[0]["metadata"]["ownerReferences"][0]["kind"] == "RLJob"


async def refused(world: World, name: str, reason: str) -> str:
    """What is said of the job's pods, with a warning."""
    job = await world.until_condition(name, "ClusterReady", "False", reason)
    message = next(item["message"] for item in job["status"]["conditions"] if item["type"] == "ClusterReady")

    async def warned() -> bool:
        return any((event["type"], event["reason"]) == ("Warning", reason) for event in await world.events(name))

    await world.until(f"a warning {reason}", warned)
    return str(message)


async def test_pods_that_quota_and_pod_security_refuse_are_named_in_the_api_servers_words(world: World) -> None:
    quotas = f"/api/v1/namespaces/{world.namespace}/resourcequotas"
    hard = {"pods": "1"}
    await world.call("POST", quotas, {"metadata": {"name": "team-a"}, "spec": {"hard": hard}})
    # Without a quota controller nobody computes what is used: as if another pod were there.
    used = {"status": {"hard": hard, "used": {"pods": "1"}}}
    await world.call("PATCH", f"{quotas}/team-a/status", used, "application/merge-patch+json")
    world.start_operator()
    await world.apply(job_document("crowded"), Play(steps=1))
    message = await refused(world, "crowded", "QuotaRefused")
    assert "FailedCreateHeadPod: pods" in message
    assert "exceeded quota: team-a, requested: pods=1, used: pods=1, limited: pods=1" in message
    await world.call("DELETE", f"{quotas}/team-a")
    await world.until_condition("crowded", "Succeeded", "True")

    labels = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    await world.call("PATCH", f"/api/v1/namespaces/{world.namespace}", labels, "application/merge-patch+json")
    as_root = {"pod": {"template": {"spec": {"securityContext": {"runAsNonRoot": False}}}}}
    await world.apply(job_document("rooted", trainer=as_root), Play(steps=1))
    message = await refused(world, "rooted", "PodSecurityRefused")
    assert 'violates PodSecurity "restricted:latest": runAsNonRoot != true' in message


async def test_kuberay_does_what_the_fake_does(world: World) -> None:
    await conforms(world)


@pytest.mark.slow(
    stands_for=[
        "test_a_job_lives_through_scaling_suspension_and_retry_with_the_real_kuberay",
        "tests/integration/test_chaos.py::test_every_job_gets_where_it_shall",
    ]
)
async def test_every_job_gets_where_it_shall_with_the_real_kuberay(world: World, network: BadNetwork) -> None:
    await walk_all(world, network, FIRST, RUNS)
