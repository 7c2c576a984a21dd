"""Objects of somebody else's that have the names which the operator would give to its own stay as they are."""

from __future__ import annotations

import pytest
from fakes.heads import Play
from world import Object, World, job_document

pytestmark = pytest.mark.timeout(400)

CONFIG_MAP: tuple[str, Object] = (
    "/api/v1/namespaces/{}/configmaps",
    {"metadata": {"name": "taken-job"}, "data": {"reward.py": "def reward(): ..."}},
)
POLICY: tuple[str, Object] = (
    "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    {"metadata": {"name": "taken-pods"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": []}},
)
CLUSTER: tuple[str, Object] = (
    "/apis/ray.io/v1/namespaces/{}/rayclusters",
    {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "taken-c1"},
        "spec": {
            "suspend": True,
            "headGroupSpec": {
                "rayStartParams": {},
                "template": {"spec": {"containers": [{"name": "ray-head", "image": "theirs"}]}},
            },
        },
    },
)


@pytest.mark.parametrize(
    ("path", "theirs", "kind"),
    [
        (*CONFIG_MAP, "ConfigMap taken-job"),
        (*POLICY, "NetworkPolicy taken-pods"),
        (*CLUSTER, "RayCluster taken-c1"),
    ],
    ids=["config-map", "network-policy", "cluster"],
)
async def test_what_is_not_the_jobs_own_is_left_alone_and_named(
    world: World, path: str, theirs: Object, kind: str
) -> None:
    collection = path.format(world.namespace)
    one = f"{collection}/{theirs['metadata']['name']}"
    before = _written(await world.call("POST", collection, theirs))
    world.start_operator()
    await world.apply(job_document("taken"), Play(steps=None))
    job = await world.until_condition("taken", "ClusterReady", "False", "ClusterRejected")
    (condition,) = (item for item in job["status"]["conditions"] if item["type"] == "ClusterReady")
    assert condition["message"] == f"there is a {kind} that does not belong to the job: rename it, or the job"
    assert _written(await world.call("GET", one)) == before
    assert [cluster["metadata"]["name"] for cluster in await world.clusters()] == (
        ["taken-c1"] if theirs is CLUSTER[1] else []
    )
    await world.call("DELETE", one)
    await world.until_condition("taken", "Running", "True", "Training")


def _written(found: Object) -> Object:
    """What its author wrote and what identifies it; KubeRay may have written a status beside it."""
    kept = {name: value for name, value in found.items() if name not in ("metadata", "status")}
    metadata = found["metadata"]
    return {**kept, "uid": metadata["uid"], "labels": metadata.get("labels"), "owners": metadata.get("ownerReferences")}
