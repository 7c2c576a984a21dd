"""The kubelets alone, for tests in which KubeRay itself makes the pods: every pod of Ray becomes ready."""

from __future__ import annotations

import asyncio
import ipaddress

from kube.control_plane import ApiCallError, ControlPlane

LOOK_SECONDS = 0.1


class FakeKubelet:
    """Plays the kubelets of one namespace until cancelled."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._plane = plane
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._addresses = ipaddress.ip_network("10.1.0.0/16").hosts()

    async def run(self) -> None:
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Starts the pods that nobody has started yet."""
        for pod in self._plane.call("GET", self._pods)["items"]:
            if pod["status"].get("podIP") or "deletionTimestamp" in pod["metadata"]:
                continue
            address = str(next(self._addresses))
            status = {
                "phase": "Running",
                "podIP": address,
                "podIPs": [{"ip": address}],
                "conditions": [
                    {"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready", "ContainersReady")
                ],
            }
            try:
                path = f"{self._pods}/{pod['metadata']['name']}/status"
                self._plane.call("PATCH", path, {"status": status}, "application/merge-patch+json")
            except ApiCallError as error:
                if error.code != 404:
                    raise
