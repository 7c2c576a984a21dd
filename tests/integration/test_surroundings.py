"""What a cluster's pods need beside it comes back when somebody deletes or changes it."""

from __future__ import annotations

import dataclasses

import pytest
from fakes.heads import Play
from kube.control_plane import ApiCallError
from world import SETTINGS, World, job_document

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
