"""What a test of the operator sees and does: apply a job, look at it, wait for it, start and kill operators."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes.heads import Driver, FakeHeads, Play
from fakes.kubelet import FakeKubelet
from kube.control_plane import ApiCallError, ControlPlane
from kube.crowding import crowding
from operator_thread import OperatorThread

from rljob_operator.operator import Options
from rljob_operator.settings import Settings

PATIENCE_SECONDS = float(os.environ.get("RLJOB_TEST_PATIENCE", "180")) * crowding()
SETTINGS = Settings(
    poll_seconds=0.1,
    start_poll_seconds=0.1,
    progress_write_seconds=0.0,
    silence_seconds=0.5,
    leftover_grace_seconds=0.5,
    kuberay_retry_seconds=0.5,
)
WITH_FAKE_AND_REAL_KUBERAY = pytest.mark.parametrize("kuberay", ["fake", "real"], indirect=True)
WITH_REAL_KUBERAY = pytest.mark.parametrize("kuberay", ["real"], indirect=True)

Object = dict[str, Any]


def job_document(name: str, **spec: Any) -> Object:
    """A small valid job; `spec` is merged over its spec, one level deep."""
    document: Object = {
        "model": {"source": "s3://models/tiny"},
        "data": {"train": {"source": "s3://data/train.jsonl"}, "prompt": "question", "answer": "answer"},
        "reward": {"functions": [{"type": "gsm8k"}]},
        "algorithm": {"preset": "grpo"},
        "placement": "separate",
        "rollout": {"replicas": 2, "maxReplicas": 8, "minReplicas": 1},
        "trainer": {"replicas": 1},
        "retry": {"limit": 2, "backoffSeconds": 0},
    }
    for section, value in spec.items():
        merged = {**document.get(section, {}), **value} if isinstance(value, dict) else value
        document[section] = merged
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": name}, "spec": document}


class World:
    """One namespace of the control plane."""

    def __init__(
        self, plane: ControlPlane, namespace: str, kubelet: FakeKubelet, heads: FakeHeads, folder: Path
    ) -> None:
        self.plane = plane
        self.namespace = namespace
        self.kubelet = kubelet
        self.heads = heads
        self.patience = PATIENCE_SECONDS  # that something comes true which a test waits for
        self._folder = folder
        self.operator: OperatorThread | None = None
        self.players: list[asyncio.Task[None]] = []  # who plays the rest of the cluster, until the test ends

    # The operator

    def start_operator(
        self,
        server: str | None = None,
        settings: Settings = SETTINGS,
        *,
        token: str | None = None,
        lease_namespace: str | None = None,
        identity: str = "operator",
        debug: bool = False,
        all_namespaces: bool = False,
        token_key: str = "k" * 64,
        key_secret: str | None = None,
        also_watches: tuple[str, ...] = (),
        probe_port: int | None = None,
    ) -> OperatorThread:
        """Starts an operator in this process that watches this namespace; the newest is `self.operator`."""
        key = self._folder / "key"
        key.write_text(token_key)
        options = Options(
            key_file=key,
            key_secret=key_secret,
            namespaces=() if all_namespaces else (self.namespace, *also_watches),
            head_address=self.heads.address,
            lease_namespace=lease_namespace,
            identity=identity,
            probe_host="127.0.0.1",
            probe_port=probe_port,
            settings=settings,
        )
        self.operator = OperatorThread(options, self.plane.credentials(server, token), debug=debug)
        return self.operator

    async def stop_operator(self) -> None:
        """Ends the operator at whatever it is doing, if it runs."""
        if self.operator is not None:
            await self.operator.stop()
            self.operator = None

    # Jobs

    def path(self, name: str, sub: str = "") -> str:
        return f"/apis/rljob.dev/v1alpha1/namespaces/{self.namespace}/rljobs/{name}{sub}"

    async def apply(self, document: Object, play: Play | None = None) -> None:
        if play is not None:
            self.heads.plays[document["metadata"]["name"]] = play
        await self.call("POST", self.path("").rstrip("/"), document)

    async def patch(self, name: str, spec: Object) -> None:
        await self.call("PATCH", self.path(name), {"spec": spec}, "application/merge-patch+json")

    async def delete(self, name: str) -> None:
        await self.call("DELETE", self.path(name), {"propagationPolicy": "Background"})

    async def job(self, name: str) -> Object:
        return await self.call("GET", self.path(name))

    async def remove_jobs(self) -> None:
        for item in (await self.call("GET", self.path("").rstrip("/")))["items"]:
            await self.delete(item["metadata"]["name"])

    def drivers(self, name: str) -> list[Driver]:
        return self.heads.drivers.get(name, [])

    # Waiting and looking

    async def call(self, method: str, path: str, body: Any = None, content: str = "application/json") -> Object:
        return await asyncio.to_thread(self.plane.call, method, path, body, content)

    async def until(self, what: str, holds: Callable[[], Any] | Any) -> Any:
        """Waits until `holds()` (a coroutine function or a function) is true, and returns what it returned."""
        began = time.monotonic()
        deadline = began + self.patience
        while True:
            if self.operator is not None and self.operator.failure is not None:
                raise self.operator.failure
            for player in self.players:
                if player.done():
                    player.result()
            found = holds()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            if time.monotonic() > deadline:
                raise AssertionError(f"still not: {what}; {await self.summary()}")
            # Looking costs the processors that what is waited for needs: what takes long is looked at less often.
            await asyncio.sleep(min(0.2, max(0.02, (time.monotonic() - began) / 10)))

    async def until_condition(self, name: str, kind: str, status: str, reason: str | None = None) -> Object:
        """Waits for a condition that says something about the job as it is now, and returns the job."""

        async def holds() -> Object | None:
            job = await self.job(name)
            if job.get("status", {}).get("observedGeneration") != job["metadata"]["generation"]:
                return None
            for item in job.get("status", {}).get("conditions", ()):
                if item["type"] == kind and item["status"] == status and reason in (None, item["reason"]):
                    return job
            return None

        found = await self.until(f"{name}: {kind}={status} ({reason})", holds)
        assert isinstance(found, dict)
        return found

    async def clusters(self) -> list[Object]:
        items = (await self.call("GET", f"/apis/ray.io/v1/namespaces/{self.namespace}/rayclusters"))["items"]
        return list(items)

    async def pods(self, group: str | None = None) -> list[Object]:
        items = (await self.call("GET", f"/api/v1/namespaces/{self.namespace}/pods"))["items"]
        return [pod for pod in items if group in (None, pod["metadata"]["labels"]["ray.io/group"])]

    async def events(self, name: str) -> list[Object]:
        """What was told about a job. An API server that starts slowly tells things of itself, which have no name."""
        items = (await self.call("GET", f"/api/v1/namespaces/{self.namespace}/events"))["items"]
        return [
            item
            for item in items
            if (item["involvedObject"]["kind"], item["involvedObject"].get("name")) == ("RLJob", name)
        ]

    async def owned_objects(self) -> list[str]:
        """Everything in the namespace that belongs to a job, as kind/name."""
        found = []
        for kind in ("configmaps", "secrets", "pods"):
            items = (await self.call("GET", f"/api/v1/namespaces/{self.namespace}/{kind}"))["items"]
            found += [f"{kind}/{i['metadata']['name']}" for i in items if i["metadata"].get("ownerReferences")]
        found += [f"rayclusters/{item['metadata']['name']}" for item in await self.clusters()]
        return found

    async def summary(self) -> str:
        """The state of the namespace in a few lines, for failures."""
        lines = []
        with suppress(ApiCallError):
            for item in (await self.call("GET", self.path("").rstrip("/")))["items"]:
                conditions = item.get("status", {}).get("conditions", ())
                said = [f"{c['type']}={c['status']}/{c['reason']}: {c['message']}" for c in conditions]
                lines.append(f"{item['metadata']['name']}: " + "; ".join(said))
            lines += [cluster["metadata"]["name"] for cluster in await self.clusters()]
            lines += [pod["metadata"]["name"] for pod in await self.pods()]
        return "\n".join(lines)
