"""A queued job on the real API server, with Kueue's own CRD: it waits in Kueue's words, loses its quota, goes on."""

from __future__ import annotations

import time

import pytest
from fakes.heads import Play
from fakes.kueue import FakeKueue
from kube.control_plane import ControlPlane
from kube.kueue import workload_crd
from world import Object, World, job_document

from testcluster.programs import ProgramMissingError

pytestmark = pytest.mark.timeout(400)

NO_QUOTA = "couldn't assign flavors to pod set head: insufficient unused quota for cpu in flavor default, 4 more needed"
PREEMPTED = "Preempted to accommodate a workload (UID: a, JobUID: b) due to prioritization in the ClusterQueue"


@pytest.fixture(scope="module")
def kueue_crd(plane: ControlPlane) -> None:
    try:
        manifest = workload_crd()
    except ProgramMissingError as problem:
        pytest.fail(str(problem), pytrace=False)
    plane.install_crds(manifest)


def said(job: Object, kind: str) -> Object:
    (found,) = [item for item in job["status"]["conditions"] if item["type"] == kind]
    return found


async def test_a_job_waits_runs_loses_its_quota_and_goes_on(kueue_crd: None, world: World) -> None:
    kueue = FakeKueue(world.plane, world.namespace)
    world.start_operator()
    play = Play(steps=None)
    await world.apply(job_document("queued", queueName="rl", retry={"limit": 0}), play)
    (cluster,) = await world.until("a cluster", world.clusters)
    assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "rl"
    workload, name = await kueue.take(cluster), cluster["metadata"]["name"]
    await kueue.refuse(workload, NO_QUOTA)

    async def quoted() -> bool:
        job = await world.job("queued")
        return bool(said(job, "Running")["message"] == f"waits for quota: {NO_QUOTA}")

    await world.until("Kueue is quoted", quoted)
    job = await world.until_condition("queued", "Admitted", "False", "WaitingForQuota")
    assert said(job, "ClusterReady")["reason"] == "WaitingForQuota"

    assert await world.pods() == []
    await kueue.admit(workload, name)
    await world.until_condition("queued", "Admitted", "True", "AdmittedByQueue")
    await world.until_condition("queued", "Running", "True", "Training")

    await kueue.preempt(workload, name, PREEMPTED)
    job = await world.until_condition("queued", "Running", "False", "QuotaTakenBack")
    assert said(job, "Running")["message"] == f"quota reclaimed: {PREEMPTED}"
    assert [item["reason"] for item in job["status"]["attempts"]] == ["QuotaTakenBack"]

    async def freed() -> bool:
        return await world.pods() == []

    await world.until("the pods are gone", freed)
    # Kueue alone decides: however long it takes, the operator doesn't start the cluster.
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        (cluster,) = await world.clusters()
        assert cluster["spec"]["suspend"] is True

    play.steps = 2
    await kueue.admit(workload, name)
    job = await world.until_condition("queued", "Succeeded", "True")
    assert [(item["attempt"], item["incarnation"]) for item in job["status"]["attempts"]] == [(1, 1), (2, 1)]
    assert job["status"]["failures"] == 0

    async def no_cluster() -> bool:
        return await world.clusters() == []

    await world.until("the quota is free: no cluster", no_cluster)


async def test_no_write_of_the_operator_owns_suspend(kueue_crd: None, world: World) -> None:
    kueue = FakeKueue(world.plane, world.namespace)
    world.start_operator()
    await world.apply(job_document("owned", queueName="rl"), Play(steps=None))
    (cluster,) = await world.until("a cluster", world.clusters)
    workload = await kueue.take(cluster)
    await kueue.admit(workload, cluster["metadata"]["name"])
    await world.until_condition("owned", "Running", "True", "Training")
    await world.patch("owned", {"rollout": {"replicas": 3}})
    await world.until_condition("owned", "Resizing", "False", "AtSize")
    (cluster,) = await world.clusters()
    owners = {
        entry["manager"]
        for entry in cluster["metadata"]["managedFields"]
        if "f:suspend" in entry["fieldsV1"].get("f:spec", {})
    }
    assert owners
    assert "rljob-operator" not in owners
