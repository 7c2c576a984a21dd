"""The kubelets: every pod of Ray becomes ready, unless the test says otherwise.

Pods aren't bound to a node, so the API server removes them at once when they are deleted. One that a test has bound to
a node stays until somebody removes it by force: no kubelet here confirms that its containers have ended.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

from kube.control_plane import ApiCallError, ControlPlane

from fakes.players import play

OF_RAY = "ray.io%2Fcluster"
"""The label that all pods of Ray have."""

Object = dict[str, Any]


class FakeKubelet:
    """Plays the kubelets of one namespace until cancelled.

    Attributes:
        becomes_ready: says of a new pod whether it becomes ready (None), or which pod status it has instead. One
            without conditions isn't its last: the pod is asked about again.
    """

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._plane = plane
        self._namespace = namespace
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._mirror = plane.mirror("/api/v1/pods", OF_RAY)
        self._addresses = ipaddress.ip_network("10.1.0.0/16").hosts()
        self.becomes_ready: Callable[[Object], Object | None] = lambda _pod: None

    async def run(self) -> None:
        await play(self.look, self._mirror)

    def look(self) -> bool:
        """Starts the pods that nobody has started yet; says whether one of them is to be asked about again."""
        left = False
        for pod in self._mirror.objects(self._namespace):
            if pod["status"].get("conditions") or "deletionTimestamp" in pod["metadata"]:
                continue
            status = self.becomes_ready(pod) or self._running()
            left |= not status.get("conditions")
            try:
                path = f"{self._pods}/{pod['metadata']['name']}/status"
                told = self._plane.call("PATCH", path, {"status": status}, "application/merge-patch+json")
            except ApiCallError as error:
                # Deleted while we looked.
                if error.code != 404:
                    raise
            else:
                self._mirror.wait_for(told)
        return left

    def _running(self) -> Object:
        address = str(next(self._addresses))
        ready = ("PodScheduled", "Ready", "ContainersReady")
        return {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": kind, "status": "True"} for kind in ready],
        }
