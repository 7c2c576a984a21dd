"""What a cluster's pods need beside it comes back when somebody deletes or changes it."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from datetime import timedelta

import pytest
from fakes.heads import Play
from kube.control_plane import ApiCallError
from world import SETTINGS, WITH_FAKE_AND_REAL_KUBERAY, World, job_document

from rljob_operator import memory

pytestmark = pytest.mark.timeout(400)


async def test_what_somebody_deleted_comes_back_within_a_sweep(world: World) -> None:
    world.start_operator(settings=dataclasses.replace(SETTINGS, sweep_seconds=1.0))
    await world.apply(job_document("job"), Play(steps=None))
    job = await world.until_condition("job", "Running", "True", "Training")
    space = f"/namespaces/{world.namespace}"
    (secret,) = [
        item["metadata"]["name"]
        for item in (await world.call("GET", f"/api/v1{space}/secrets"))["items"]
        if item["metadata"]["name"].startswith(f"job-c1-{job['metadata']['uid'][:8]}")
    ]
    paths = [
        f"/api/v1{space}/configmaps/job-job",
        f"/api/v1{space}/secrets/{secret}",
        f"/apis/networking.k8s.io/v1{space}/networkpolicies/job-pods",
    ]
    before = [await world.call("GET", path) for path in paths]
    for path in paths:
        await world.call("DELETE", path)

    async def are_back() -> bool:
        try:
            return [content(await world.call("GET", path)) for path in paths] == [content(item) for item in before]
        except ApiCallError:
            return False

    await world.until("all is as before", are_back)
    # Not only what is gone: a policy that somebody has opened is closed again.
    await world.call("PATCH", paths[2], {"spec": {"ingress": [{}]}}, "application/merge-patch+json")
    await world.until("all is as before", are_back)
    # Tokens cannot be set right by an operator that may only create Secrets, so nobody changes them.
    with pytest.raises(ApiCallError, match="field is immutable"):
        await world.call("PATCH", paths[1], {"data": {"driver_token": "eA=="}}, "application/merge-patch+json")
    assert len(world.drivers("job")) == 1


def content(item: dict[str, object]) -> dict[str, object]:
    return {name: item.get(name) for name in ("data", "spec", "type")}


@WITH_FAKE_AND_REAL_KUBERAY
async def test_pod_templates_changed_by_hand_are_as_they_were_within_a_sweep(world: World) -> None:
    world.start_operator(settings=dataclasses.replace(SETTINGS, sweep_seconds=1.0))
    await world.apply(job_document("job"), Play(steps=None))
    await world.until_condition("job", "Running", "True", "Training")
    path = f"/apis/ray.io/v1/namespaces/{world.namespace}/rayclusters/job-c1"
    before = (await world.clusters())[0]["spec"]
    generation = (await world.clusters())[0]["metadata"]["generation"]
    pods = {pod["metadata"]["uid"] for pod in await world.pods()}
    # What it has written itself it takes for what it wrote: nothing is patched, sweep after sweep.
    await asyncio.sleep(3.0)
    assert (await world.clusters())[0]["metadata"]["generation"] == generation
    index = [group["groupName"] for group in before["workerGroupSpecs"]].index("trainer")
    template = f"/spec/workerGroupSpecs/{index}/template/spec"
    edits = [
        {"op": "replace", "path": f"{template}/containers/0/image", "value": "elsewhere/other:2"},
        {"op": "add", "path": f"{template}/containers/0/env/0", "value": {"name": "ADDED", "value": "by hand"}},
        {"op": "replace", "path": f"{template}/automountServiceAccountToken", "value": True},
        {"op": "add", "path": "/spec/headGroupSpec/template/spec/restartPolicy", "value": "Always"},
    ]
    await world.call("PATCH", path, edits, "application/json-patch+json")

    async def as_before() -> bool:
        spec = copy.deepcopy((await world.clusters())[0]["spec"])
        variables = spec["workerGroupSpecs"][index]["template"]["spec"]["containers"][0]["env"]
        # What somebody adds stays his own.
        if {"name": "ADDED", "value": "by hand"} not in variables:
            return False
        variables.remove({"name": "ADDED", "value": "by hand"})
        return bool(spec == before)

    await world.until("the groups are as they were made", as_before)

    async def told() -> bool:
        return any(event["reason"] == "PutBack" for event in await world.events("job"))

    # It is told after it is done.
    await world.until("it is told", told)
    assert {pod["metadata"]["uid"] for pod in await world.pods()} == pods
    assert len(world.drivers("job")) == 1


@WITH_FAKE_AND_REAL_KUBERAY
async def test_a_group_whose_replicas_were_reshaped_or_switched_off_by_hand_trains_again(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("job"), Play(steps=None))
    await world.until_condition("job", "Running", "True", "Training")
    path = f"/apis/ray.io/v1/namespaces/{world.namespace}/rayclusters/job-c1"
    names = [group["groupName"] for group in (await world.clusters())[0]["spec"]["workerGroupSpecs"]]
    trainer, rollout = (f"/spec/workerGroupSpecs/{names.index(name)}" for name in ("trainer", "rollout"))
    edits = [
        {"op": "add", "path": f"{trainer}/numOfHosts", "value": 2},
        {"op": "add", "path": f"{rollout}/suspend", "value": True},
    ]
    await world.call("PATCH", path, edits, "application/json-patch+json")

    async def trains() -> bool:
        groups = (await world.clusters())[0]["spec"]["workerGroupSpecs"]
        here = {(group["numOfHosts"], group.get("suspend", False)) for group in groups}
        pods = [pod for pod in await world.pods() if "deletionTimestamp" not in pod["metadata"]]
        return here == {(1, False)} and len(pods) == 1 + sum(group["replicas"] for group in groups)

    await world.until("the groups have their pods", trains)
    await world.until_condition("job", "Running", "True", "Training")
    # KubeRay itself may have made the trainer's pod anew; the cluster stays.
    assert [cluster["metadata"]["name"] for cluster in await world.clusters()] == ["job-c1"]


async def test_what_a_new_pod_waits_for_is_back_before_the_next_sweep(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "WAITING", timedelta(seconds=2))
    world.start_operator()
    await world.apply(job_document("job", rollout={"replicas": 3}), Play(steps=None))
    await world.until_condition("job", "ClusterReady", "True", "PoolsReady")
    path = f"/api/v1/namespaces/{world.namespace}/configmaps/job-job"

    async def is_there() -> bool:
        try:
            await world.call("GET", path)
        except ApiCallError:
            return False
        return True

    await world.call("DELETE", path)
    assert not await is_there()
    # As kubelet does with a pod whose volume's ConfigMap is not there.
    world.kubelet.becomes_ready = lambda _pod: {"phase": "Pending"}
    lost = (await world.pods("rollout"))[0]["metadata"]["name"]
    await world.call("DELETE", f"/api/v1/namespaces/{world.namespace}/pods/{lost}", {"gracePeriodSeconds": 0})
    await world.until("the job file is there", is_there)
