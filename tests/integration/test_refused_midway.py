"""What an API server refuses while a job runs is said on the job, and keeps nothing else from being done."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fakes.heads import Play
from kube.control_plane import ApiCallError
from world import World, job_document

pytestmark = pytest.mark.timeout(400)

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
POLICIES = f"{ADMISSION}/validatingadmissionpolicies"
BINDINGS = f"{ADMISSION}/validatingadmissionpolicybindings"
WHY = "frozen by the security team"


@asynccontextmanager
async def frozen(world: World, group: str, plural: str) -> AsyncIterator[None]:
    """A policy under which no object of a kind in the namespace can be created or changed."""
    name = f"{world.namespace}-{plural}"
    rule = {"apiGroups": [group], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": [plural]}
    policy = {
        "metadata": {"name": name},
        "spec": {
            "matchConstraints": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": world.namespace}},
                "resourceRules": [rule],
            },
            "validations": [{"expression": "false", "message": WHY}],
        },
    }
    binding = {"metadata": {"name": name}, "spec": {"policyName": name, "validationActions": ["Deny"]}}
    await world.call("POST", POLICIES, policy)
    await world.call("POST", BINDINGS, binding)
    try:
        yield
    finally:
        await world.call("DELETE", f"{BINDINGS}/{name}")
        await world.call("DELETE", f"{POLICIES}/{name}")


async def in_force(world: World, probe: dict[str, Any]) -> None:
    """Returns when a policy on config maps has begun to hold, which takes the API server some seconds."""

    async def refused() -> bool:
        path = f"/api/v1/namespaces/{world.namespace}/configmaps?dryRun=All"
        try:
            await world.call("POST", path, probe)
        except ApiCallError as error:
            return WHY in str(error)
        return False

    await world.until("the policy holds", refused)


async def test_a_refused_job_file_is_said_and_the_driver_hears_all_the_same(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("steered"), Play(steps=None, checkpoints=True))
    await world.until_condition("steered", "Running", "True", "Training")
    async with frozen(world, "", "configmaps"):
        await in_force(world, {"metadata": {"name": "probe"}})
        await world.patch("steered", {"rollout": {"replicas": 3}})
        job = await world.until_condition("steered", "ClusterReady", "True", "ClusterRejected")
        (said,) = [item for item in job["status"]["conditions"] if item["type"] == "ClusterReady"]
        assert WHY in said["message"]
        await world.until_condition("steered", "Resizing", "False", "AtSize")
        # Nobody waits for the pause of a job that cannot save: it saves.
        await world.patch("steered", {"suspend": True})
        await world.until_condition("steered", "Suspended", "True")
        assert [driver.desired[-1].suspend for driver in world.drivers("steered")] == [True]

        async def told() -> bool:
            return any(event["reason"] == "ClusterRejected" for event in await world.events("steered"))

        await world.until("it is told", told)
    await world.patch("steered", {"suspend": False})
    await world.until_condition("steered", "ClusterReady", "True", "PoolsReady")
    await world.until_condition("steered", "Running", "True", "Training")


async def test_a_driver_with_a_very_long_log_ends_like_any_other(world: World) -> None:
    world.start_operator()
    line = "a line of a reward function that prints every sample\n"
    log = line * (9 * 1024 * 1024 // len(line)) + "the last line\n"
    await world.apply(job_document("talkative"), Play(steps=2, exits={1: 1}, logs=log))
    job = await world.until_condition("talkative", "Succeeded", "True")
    assert job["status"]["attempts"][0]["lastLines"][-1] == "the last line"


async def test_groups_and_bounds_changed_by_hand_are_restored(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("edited"), Play(steps=None))
    await world.until_condition("edited", "Running", "True", "Training")
    path = f"/apis/ray.io/v1/namespaces/{world.namespace}/rayclusters/edited-c1"
    before = {pod["metadata"]["name"] for pod in await world.pods()}
    (made,) = await world.clusters()
    groups = made["spec"]["workerGroupSpecs"]
    changed = [{**group, "minReplicas": 4, "maxReplicas": 4} for group in groups if group["groupName"] == "rollout"]
    await world.call("PATCH", path, {"spec": {"workerGroupSpecs": changed}}, "application/merge-patch+json")

    async def restored() -> bool:
        (cluster,) = await world.clusters()
        here = {pod["metadata"]["name"] for pod in await world.pods()}
        there = {group["groupName"]: _sizes(group) for group in cluster["spec"]["workerGroupSpecs"]}
        return there == {group["groupName"]: _sizes(group) for group in groups} and here == before

    await world.until("groups and pods are as they were", restored)
    (cluster,) = await world.clusters()
    templates = {group["groupName"]: group["template"] for group in cluster["spec"]["workerGroupSpecs"]}
    assert templates == {group["groupName"]: group["template"] for group in groups}
    assert len(world.drivers("edited")) == 1


def _sizes(group: dict[str, Any]) -> tuple[int, int, int]:
    return group["replicas"], group["minReplicas"], group["maxReplicas"]
