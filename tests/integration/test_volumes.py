"""Claims on the real API server: a job waits for one that is missing or can't be shared, and goes on by itself."""

from __future__ import annotations

import pytest
from fakes.heads import Play
from world import Object, World, job_document

pytestmark = pytest.mark.timeout(400)


def claim(name: str, mode: str) -> Object:
    resources = {"requests": {"storage": "1Gi"}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": [mode], "storageClassName": "shared", "resources": resources},
    }


async def create(world: World, name: str, mode: str) -> str:
    claims = f"/api/v1/namespaces/{world.namespace}/persistentvolumeclaims"
    await world.call("POST", claims, claim(name, mode))
    return f"{claims}/{name}"


async def bind(world: World, path: str, mode: str) -> None:
    """What the volume controller does."""
    status = {"phase": "Bound", "accessModes": [mode], "capacity": {"storage": "1Gi"}}
    await world.call("PATCH", f"{path}/status", {"status": status}, "application/merge-patch+json")


async def test_a_job_waits_for_its_claims_without_pods_and_then_trains(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("stored", checkpoint={"uri": "pvc://state/runs"}), Play(steps=2))
    job = await world.until_condition("stored", "Accepted", "False", "VolumeMissing")
    (said,) = [item for item in job["status"]["conditions"] if item["type"] == "Running"]
    assert said["message"] == "spec.checkpoint.uri: PersistentVolumeClaim state does not exist"

    path = await create(world, "state", "ReadWriteOnce")
    await world.until_condition("stored", "Accepted", "False", "VolumeNotShared")
    assert (await world.clusters(), await world.pods()) == ([], [])

    # A protected claim is only on its way out until its controller, which nobody runs here, takes the finalizer away.
    await world.call("DELETE", path)
    await world.until_condition("stored", "Accepted", "False", "VolumeMissing")
    await world.call("PATCH", path, {"metadata": {"finalizers": None}}, "application/merge-patch+json")
    path = await create(world, "state", "ReadWriteMany")
    await world.until_condition("stored", "Accepted", "True", "Valid")
    await world.until("pods", world.pods)
    await bind(world, path, "ReadWriteMany")
    await world.until_condition("stored", "Succeeded", "True")


async def test_pods_that_wait_for_an_unbound_claim_say_so(world: World) -> None:
    world.start_operator()
    world.kubelet.becomes_ready = lambda _pod: {
        "phase": "Pending",
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            }
        ],
    }
    path = await create(world, "models", "ReadOnlyMany")
    await world.apply(job_document("reader", model={"source": "pvc://models/tiny"}), Play(steps=1))
    job = await world.until_condition("reader", "ClusterReady", "False", "VolumeUnbound")
    (said,) = [item for item in job["status"]["conditions"] if item["type"] == "ClusterReady"]
    assert said["message"].startswith(
        "spec.model.source: PersistentVolumeClaim models waits for a volume of class shared; head: 1 of 1 pod waits"
    )
    await bind(world, path, "ReadOnlyMany")
    await world.until_condition("reader", "ClusterReady", "False", "Unschedulable")
