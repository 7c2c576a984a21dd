"""KubeRay's controller: makes pods of RayClusters. Somebody else plays the kubelets (`fakes.kubelet`).

Faithful in what the operator relies on: names and labels of pods, replacement of ended pods, `replicas` clamped to min
and max, `workersToDelete` honoured and left in the spec, a pod that is being deleted counted until it is gone, a
suspended cluster without pods, status of the cluster.

Kueue's webhook suspends a cluster that names a queue before KubeRay can see it; `fakes.kueue` can do so only after:
such a cluster is left alone until somebody has said whether it is suspended.
"""

from __future__ import annotations

import secrets
from typing import Any

from kube.control_plane import ApiCallError, ControlPlane

from fakes.kubelet import OF_RAY
from fakes.kueue import QUEUE
from fakes.players import play

Object = dict[str, Any]


class FakeKubeRay:
    """Plays KubeRay until cancelled."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._plane = plane
        self._namespace = namespace
        self._clusters = plane.mirror("/apis/ray.io/v1/rayclusters")
        self._pods = plane.mirror("/api/v1/pods", OF_RAY)

    async def run(self) -> None:
        await play(self.look, self._clusters, self._pods)

    def look(self) -> bool:
        """One look at all clusters of the namespace; says whether another is due though nothing changes."""
        left = False
        clusters, pods = self._clusters.objects(self._namespace), self._pods.objects(self._namespace)
        for cluster in clusters:
            name = cluster["metadata"]["name"]
            if "deletionTimestamp" in cluster["metadata"] or _before_the_webhook(cluster):
                continue
            mine = [pod for pod in pods if pod["metadata"]["labels"]["ray.io/cluster"] == name]
            try:
                self._reconcile(cluster, mine)
            except ApiCallError as error:
                # Deleted while we looked, or about to be.
                if error.code not in (403, 404, 409):
                    raise
                left = True
        return left

    def _reconcile(self, cluster: Object, pods: list[Object]) -> None:
        spec = cluster["spec"]
        if spec.get("suspend"):
            for pod in pods:
                self._delete(pod)
            return
        for pod in [pod for pod in pods if pod["status"].get("phase") in ("Failed", "Succeeded")]:
            self._delete(pod)
            pods.remove(pod)
        heads = [pod for pod in pods if pod["metadata"]["labels"]["ray.io/node-type"] == "head"]
        if not heads:
            self._create(cluster, spec["headGroupSpec"]["template"], "headgroup", "head")
        for group in spec["workerGroupSpecs"]:
            self._reconcile_group(cluster, group, pods)
        self._report(cluster, pods)

    def _reconcile_group(self, cluster: Object, group: Object, pods: list[Object]) -> None:
        workers = [pod for pod in pods if pod["metadata"]["labels"]["ray.io/group"] == group["groupName"]]
        for name in (group.get("scaleStrategy") or {}).get("workersToDelete") or ():
            for pod in [pod for pod in workers if pod["metadata"]["name"] == name]:
                self._delete(pod)
                workers.remove(pod)
        wanted = max(group["minReplicas"], min(group["replicas"], group["maxReplicas"])) * group.get("numOfHosts", 1)
        for _ in range(wanted - len(workers)):
            self._create(cluster, group["template"], group["groupName"], "worker")
        # Like KubeRay: no matter which.
        for pod in workers[: max(0, len(workers) - wanted)]:
            self._delete(pod)

    def _create(self, cluster: Object, template: Object, group: str, kind: str) -> None:
        metadata = cluster["metadata"]
        role = "head" if kind == "head" else f"{group}-worker"
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{metadata['name']}-{role}-{secrets.token_hex(3)}",
                "namespace": metadata["namespace"],
                "labels": {
                    **template["metadata"].get("labels", {}),
                    "ray.io/cluster": metadata["name"],
                    "ray.io/group": group,
                    "ray.io/node-type": kind,
                },
                "annotations": template["metadata"].get("annotations", {}),
                "ownerReferences": [
                    {
                        "apiVersion": "ray.io/v1",
                        "kind": "RayCluster",
                        "name": metadata["name"],
                        "uid": metadata["uid"],
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": template["spec"],
        }
        # One that is gone leaves its pods to the garbage collector, and the mirror may not have seen it go.
        self._plane.call("GET", _path(cluster))
        self._pods.wait_for(self._plane.call("POST", f"/api/v1/namespaces/{metadata['namespace']}/pods", pod))

    def _delete(self, pod: Object) -> None:
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        try:
            self._plane.call("DELETE", path)
        except ApiCallError as error:
            if error.code != 404:
                raise

    def _report(self, cluster: Object, pods: list[Object]) -> None:
        ready = [
            pod
            for pod in pods
            if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
        ]
        workers = [pod for pod in ready if pod["metadata"]["labels"]["ray.io/node-type"] == "worker"]
        status = {"readyWorkerReplicas": len(workers)}
        if len(ready) > len(workers):
            status["state"] = "ready"  # type: ignore[assignment]
        if status != {key: (cluster.get("status") or {}).get(key) for key in status}:
            said = self._plane.call(
                "PATCH", f"{_path(cluster)}/status", {"status": status}, "application/merge-patch+json"
            )
            self._clusters.wait_for(said)


def _path(cluster: Object) -> str:
    metadata = cluster["metadata"]
    return f"/apis/ray.io/v1/namespaces/{metadata['namespace']}/rayclusters/{metadata['name']}"


def _before_the_webhook(cluster: Object) -> bool:
    return QUEUE in cluster["metadata"].get("labels", {}) and "suspend" not in cluster["spec"]
