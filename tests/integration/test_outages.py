"""When Kubernetes itself is the trouble: refused objects, and an API server that goes away."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from fakes.heads import FakeHeads, Play
from kube.control_plane import ApiCallError, ControlPlane
from world import World, job_document

from rljob_api.crd import rendered

pytestmark = pytest.mark.timeout(180)


async def test_a_refused_cluster_is_explained_and_made_when_it_is_allowed(world: World) -> None:
    quotas = f"/api/v1/namespaces/{world.namespace}/resourcequotas"
    none = {"metadata": {"name": "none"}, "spec": {"hard": {"count/rayclusters.ray.io": "0"}}}
    await world.call("POST", quotas, none)
    # Without a quota controller nobody computes what is used.
    used = {"status": {"hard": none["spec"]["hard"], "used": {"count/rayclusters.ray.io": "0"}}}  # type: ignore[index]
    await world.call("PATCH", f"{quotas}/none/status", used, "application/merge-patch+json")
    world.start_operator()
    await world.apply(job_document("refused"), Play(steps=1))
    job = await world.until_condition("refused", "ClusterReady", "False", "ClusterRejected")
    message = next(c["message"] for c in job["status"]["conditions"] if c["type"] == "ClusterReady")
    assert "exceeded quota: none" in message
    await world.call("DELETE", f"{quotas}/none")
    await world.until_condition("refused", "Succeeded", "True")


async def test_a_job_outlives_the_api_servers_absence(world: World) -> None:
    operator = world.start_operator(lease_namespace=world.namespace)
    play = Play(steps=None)
    await world.apply(job_document("orphaned"), play)
    await world.until_condition("orphaned", "Running", "True", "Training")
    # Holds up the fakes too; the operator has a thread of its own.
    world.plane.restart_api_server(9.0)
    assert operator.alive
    play.steps = 1

    async def over() -> bool:
        with suppress(OSError, ApiCallError):
            job = await world.job("orphaned")
            return any(c["type"] == "Succeeded" and c["status"] == "True" for c in job["status"]["conditions"])
        return False

    await world.until("the job has succeeded", over)
    assert operator.failure is None
    assert len(world.drivers("orphaned")) == 1


async def test_a_missing_kuberay_is_said_and_noticed_when_it_comes(plane: ControlPlane, tmp_path: Path) -> None:
    with ControlPlane(plane.programs, tmp_path / "control-plane") as bare:
        bare.install_crd(rendered().encode())
        heads = FakeHeads(bare)
        heads.address = "http://127.0.0.1:9/{namespace}/{service}/{port}"
        world = World(bare, "default", None, heads, tmp_path)
        world.start_operator()
        try:
            await world.apply(job_document("early"))
            await world.until_condition("early", "Accepted", "False", "KubeRayMissing")
            bare.install_missing_crds(path for path in plane.programs.crds if "rayclusters" in path.name)
            await world.until_condition("early", "Accepted", "True", "Valid")
            await world.until("the cluster is there", world.clusters)
        finally:
            await world.stop_operator()
