"""What the operator relies on in KubeRay, as one script. The fake must pass it, and so must KubeRay itself."""

from __future__ import annotations

from typing import Any

from world import World

Object = dict[str, Any]
NAME = "conform"
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
POOLS = ("rollout", "trainer")


def _template(role: str) -> Object:
    container = {"name": "ray", "image": "rljob/trainer:0", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
    labels = {"rljob.dev/job": NAME, "example.com/role": role}
    return {
        "metadata": {"labels": labels, "annotations": {"example.com/note": role}},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }


CLUSTER: Object = {
    "apiVersion": "ray.io/v1",
    "kind": "RayCluster",
    "metadata": {"name": NAME, "labels": {"rljob.dev/job": NAME}},
    "spec": {
        "rayVersion": "2.60.0",
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _template("head")},
        "workerGroupSpecs": [
            {
                "groupName": name,
                "replicas": replicas,
                "minReplicas": 0,
                "maxReplicas": 4,
                "numOfHosts": 1,
                "rayStartParams": {},
                "template": _template(name),
            }
            for name, replicas in zip(POOLS, (3, 1), strict=True)
        ],
    },
}


class _Script:
    def __init__(self, world: World) -> None:
        self._world = world
        self._path = f"/apis/ray.io/v1/namespaces/{world.namespace}/rayclusters/{NAME}"

    async def pods(self, group: str | None = None) -> dict[str, Object]:
        """Living pods by name."""
        return {
            pod["metadata"]["name"]: pod
            for pod in await self._world.pods(group)
            if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") not in ("Failed", "Succeeded")
        }

    async def until_pods(self, what: str, **wanted: int) -> dict[str, Object]:
        """Waits until each group has so many pods, all of them ready."""
        groups = {"headgroup": 1, "rollout": 3, "trainer": 1} | wanted

        async def there() -> dict[str, Object] | None:
            found = await self.pods()
            counts = dict.fromkeys(groups, 0)
            for pod in found.values():
                counts[pod["metadata"]["labels"]["ray.io/group"]] += 1
            ready = all(
                any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
                for pod in found.values()
            )
            return (found or {"nobody": {}}) if counts == groups and ready else None

        found = await self._world.until(f"{what}: {groups}", there)
        assert isinstance(found, dict)
        return {name: pod for name, pod in found.items() if pod}

    async def change(self, body: Any, content: str = MERGE) -> None:
        await self._world.call("PATCH", self._path, body, content)

    async def cluster(self) -> Object:
        return await self._world.call("GET", self._path)

    async def resize(self, replicas: int, removing: tuple[str, ...] = (), pool: str = "rollout") -> None:
        group = f"/spec/workerGroupSpecs/{POOLS.index(pool)}"
        strategy = {"workersToDelete": list(removing)} if removing else {}
        await self.change(
            [
                {"op": "test", "path": f"{group}/groupName", "value": pool},
                {"op": "replace", "path": f"{group}/replicas", "value": replicas},
                {"op": "add", "path": f"{group}/scaleStrategy", "value": strategy},
            ],
            JSON_PATCH,
        )

    async def end(self, pod: str, status: Object) -> None:
        await self._world.call("PATCH", self.pod(pod, "/status"), {"status": {"phase": "Failed", **status}}, MERGE)

    def pod(self, name: str, sub: str = "") -> str:
        return f"/api/v1/namespaces/{self._world.namespace}/pods/{name}{sub}"


async def conforms(world: World) -> None:
    """Creation, labels, names, sizes, removal by name, replacement, lost nodes, suspension, deletion."""
    script = _Script(world)
    await world.call("POST", f"/apis/ray.io/v1/namespaces/{world.namespace}/rayclusters", CLUSTER)
    first = await script.until_pods("created")
    for name, pod in first.items():
        metadata = pod["metadata"]
        kind = "head" if metadata["labels"]["ray.io/group"] == "headgroup" else "worker"
        assert metadata["labels"]["ray.io/cluster"] == NAME
        assert metadata["labels"]["ray.io/node-type"] == kind
        # Labels and annotations of the template are on the pod: the operator watches by one of them.
        assert metadata["labels"]["rljob.dev/job"] == NAME
        assert metadata["annotations"]["example.com/note"] == metadata["labels"]["example.com/role"]
        assert name.startswith(f"{NAME}-")
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["controller"]) == ("RayCluster", NAME, True)

    async def reports_ready() -> bool:
        status = (await script.cluster()).get("status") or {}
        return status.get("state") == "ready" and status.get("readyWorkerReplicas") == 4

    await world.until("the status says ready, with four workers", reports_ready)

    # Removal by name: exactly those, and the names stay in the spec.
    going = sorted(name for name in first if "rollout" in name)[1:]
    await script.resize(1, tuple(going))
    smaller = await script.until_pods("smaller", rollout=1)
    assert set(first) - set(smaller) == set(going)
    kept = (await script.cluster())["spec"]["workerGroupSpecs"][0]
    assert sorted(kept["scaleStrategy"]["workersToDelete"]) == going
    await script.resize(1)

    # More than maxReplicas is capped; what was there stays.
    await script.resize(9)
    larger = await script.until_pods("larger", rollout=4)
    assert set(smaller) <= set(larger)
    await script.resize(2)
    await script.until_pods("smaller without names", rollout=2)

    # A worker that has ended is replaced by one of another name, and so is the head.
    for group in ("rollout", "headgroup"):
        before = await script.pods()
        gone = next(name for name, pod in before.items() if pod["metadata"]["labels"]["ray.io/group"] == group)
        await script.end(gone, {"conditions": [{"type": "Ready", "status": "False"}]})

        async def replaced(gone: str = gone) -> bool:
            return gone not in await script.pods()

        await world.until(f"{gone} is given up", replaced)
        after = await script.until_pods("replaced", rollout=2)
        assert {name for name in before if name != gone} <= set(after)

    # A pod that is being deleted counts until it is gone. Its node is lost: nobody says that it has ended. The groups
    # are seen to in order: one more trainer comes after a pod of the first group would have been replaced.
    before = await script.pods("rollout")
    lost = next(iter(before))
    target = {"apiVersion": "v1", "kind": "Node", "name": "lost"}
    await world.call("POST", script.pod(lost, "/binding"), {"metadata": {"name": lost}, "target": target})
    await world.call("DELETE", script.pod(lost), {"gracePeriodSeconds": 1})
    await script.resize(2, pool="trainer")
    await script.until_pods("one is going", rollout=1, trainer=2)
    assert {pod["metadata"]["name"] for pod in await world.pods("rollout")} == set(before)
    await world.call("DELETE", script.pod(lost), {"gracePeriodSeconds": 0})
    await script.until_pods("replaced once it is gone", rollout=2, trainer=2)
    await script.resize(1, pool="trainer")
    await script.until_pods("as before", rollout=2)

    # A suspended cluster has no pods; it gets them back.
    await script.change({"spec": {"suspend": True}})
    await script.until_pods("suspended", headgroup=0, rollout=0, trainer=0)
    await script.change({"spec": {"suspend": False}})
    await script.until_pods("resumed", rollout=2)

    await world.call("DELETE", script._path, {"propagationPolicy": "Background"})
    await script.until_pods("deleted", headgroup=0, rollout=0, trainer=0)
