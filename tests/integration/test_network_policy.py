"""A job's network policy on the real API server: there before the pods, and gone with the job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.heads import Play
from kube.control_plane import ApiCallError
from world import SETTINGS, World, job_document

pytestmark = pytest.mark.timeout(400)


def path(world: World, name: str = "") -> str:
    return f"/apis/networking.k8s.io/v1/namespaces/{world.namespace}/networkpolicies/{name}".rstrip("/")


async def test_the_policy_is_there_before_the_cluster_and_goes_with_the_job(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("guarded"), Play(steps=None))
    await world.until_condition("guarded", "Running", "True", "Training")
    policy = await world.call("GET", path(world, "guarded-pods"))
    (cluster,) = await world.clusters()
    assert int(policy["metadata"]["resourceVersion"]) < int(
        next(item for item in await world.pods())["metadata"]["resourceVersion"]
    )
    assert policy["metadata"]["creationTimestamp"] <= cluster["metadata"]["creationTimestamp"]
    selector = policy["spec"]["podSelector"]["matchLabels"]
    for pod in await world.pods():
        assert selector.items() <= pod["metadata"]["labels"].items()

    await world.delete("guarded")

    async def gone() -> bool:
        return (await world.call("GET", path(world)))["items"] == []

    await world.until("the policy is collected", gone)


async def test_switched_off_a_former_policy_goes_with_the_next_incarnation(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("open"), Play(steps=None))
    await world.until_condition("open", "Running", "True", "Training")
    await world.call("GET", path(world, "open-pods"))
    await world.stop_operator()
    world.start_operator(settings=replace(SETTINGS, network_policy=False))
    await world.patch("open", {"suspend": True})
    await world.until_condition("open", "Suspended", "True")
    await world.patch("open", {"suspend": False})
    await world.until_condition("open", "Running", "True", "Training")
    with pytest.raises(ApiCallError, match="404"):
        await world.call("GET", path(world, "open-pods"))
