"""Kueue's part in a job's life: its webhook, its Workloads and its `spec.suspend`, with Kueue's own CRD.

What is played is what Kueue 0.19 does to RayClusters that name a queue: it suspends them when they appear, makes a
Workload owned by the cluster, and, as a test tells it, reserves quota, admits, takes back, admits again. The order of
its writes at an eviction is Kueue's: the Workload is Evicted, then the cluster is suspended, then the quota is free.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from kube.control_plane import ApiCallError, ControlPlane

Object = dict[str, Any]
QUEUE = "kueue.x-k8s.io/queue-name"
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/namespaces/{}/workloads"


class FakeKueue:
    """Kueue for one namespace, moved by the test."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._plane = plane
        self._namespace = namespace

    async def take(self, cluster: Object) -> str:
        """Suspends a new RayCluster and makes its Workload; returns the Workload's name."""
        name = cluster["metadata"]["name"]
        await self._suspend(name, True)
        made = {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "Workload",
            "metadata": {
                "name": f"raycluster-{name}-1a2b3",
                "labels": {"kueue.x-k8s.io/job-uid": cluster["metadata"]["uid"]},
                "ownerReferences": [
                    {
                        "apiVersion": "ray.io/v1",
                        "kind": "RayCluster",
                        "name": name,
                        "uid": cluster["metadata"]["uid"],
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": {
                "queueName": cluster["metadata"]["labels"][QUEUE],
                "podSets": [{"name": "head", "count": 1, "template": cluster["spec"]["headGroupSpec"]["template"]}],
            },
        }
        await self._call("POST", WORKLOADS.format(self._namespace), made)
        return str(made["metadata"]["name"])  # type: ignore[index]

    async def refuse(self, workload: str, message: str) -> None:
        """There is no quota."""
        await self._say(workload, QuotaReserved=("False", "Pending", message))

    async def admit(self, workload: str, cluster: str) -> None:
        """Quota is reserved, all checks are ready, and the cluster starts."""
        flavors = {"name": "head", "count": 1}
        await self._say(
            workload,
            {"admission": {"clusterQueue": "cq", "podSetAssignments": [flavors]}},
            QuotaReserved=("True", "QuotaReserved", "Quota reserved in ClusterQueue cq"),
            Admitted=("True", "Admitted", "The workload is admitted"),
            Evicted=("False", "QuotaReserved", "Previously: it was"),
            Preempted=("False", "QuotaReserved", "Previously: it was"),
        )
        await self._suspend(cluster, False)

    async def preempt(self, workload: str, cluster: str, message: str) -> None:
        """Takes the quota back for somebody else."""
        await self._say(workload, Evicted=("True", "Preempted", message), Preempted=("True", "InClusterQueue", message))
        await self._suspend(cluster, True)
        await self._say(
            workload,
            {"admission": None},
            QuotaReserved=("False", "Pending", message),
            Admitted=("False", "NoReservation", "The workload has no reservation"),
        )

    async def _say(self, workload: str, more: Object | None = None, **conditions: tuple[str, str, str]) -> None:
        path = f"{WORKLOADS.format(self._namespace)}/{workload}"
        before = {
            item["type"]: item for item in (await self._call("GET", path)).get("status", {}).get("conditions", ())
        }
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for kind, (status, reason, message) in conditions.items():
            said = {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now}
            before[kind] = said
        body = {"status": {"conditions": list(before.values()), **(more or {})}}
        await self._call("PATCH", f"{path}/status", body, "application/merge-patch+json")

    async def _suspend(self, cluster: str, value: bool) -> None:
        path = f"/apis/ray.io/v1/namespaces/{self._namespace}/rayclusters/{cluster}"
        await self._call("PATCH", path, {"spec": {"suspend": value}}, "application/merge-patch+json")

    async def _call(self, method: str, path: str, body: Any = None, content: str = "application/json") -> Object:
        try:
            return await asyncio.to_thread(self._plane.call, method, path, body, content)
        except ApiCallError as error:
            raise AssertionError(f"Kueue's {method} {path}: {error}") from error
