"""What KubeRay refuses or quietly misunderstands, checked before a cluster is created.

The API server takes such clusters; KubeRay then only posts a Warning event, minutes later and where nobody looks, or
does something else than was meant (groups of the same name, a group called `headgroup`). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rljob_operator import names

OLDEST_RAY_WITH_TOKENS = (2, 52, 0)
RESERVED_GROUPS = {"head", "headgroup"}
FORBIDDEN_ON_HEAD = {
    "RAY_REDIS_ADDRESS": "it would enable fault tolerance only partly",
    "REDIS_PASSWORD": "it would enable fault tolerance only partly",
    "RAY_enable_autoscaler_v2": "the pools have no autoscaler",
}
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def problems(cluster: Mapping[str, Any]) -> list[str]:
    """What is wrong with a RayCluster, in sentences; nothing if KubeRay will do as it says."""
    return [*_name(cluster), *_groups(cluster["spec"]["workerGroupSpecs"]), *_head(cluster["spec"])]


def _name(cluster: Mapping[str, Any]) -> Iterator[str]:
    name = cluster["metadata"]["name"]
    if len(name) > names.MAX_CLUSTER_NAME:
        yield f"metadata.name: {name} has {len(name)} characters, but KubeRay allows at most {names.MAX_CLUSTER_NAME}"
    if not _DNS_1035.fullmatch(name):
        yield f"metadata.name: {name} must start with a letter and contain only a-z, 0-9 and -"


def _groups(groups: list[Mapping[str, Any]]) -> Iterator[str]:
    if len(groups) > names.MAX_WORKER_GROUPS:
        yield f"{len(groups)} pools are more than {names.MAX_WORKER_GROUPS}"
    known = [group["groupName"] for group in groups]
    for name in sorted({name for name in known if known.count(name) > 1}):
        yield f"there are two pools called {name}"
    for group in groups:
        name = group["groupName"]
        if name in RESERVED_GROUPS:
            yield f"a pool cannot be called {name}"
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            low, high = group["minReplicas"], group["maxReplicas"]
            yield f"spec.{name}.replicas: {group['replicas']} is not between {low} and {high}"


def _head(spec: Mapping[str, Any]) -> Iterator[str]:
    container = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
    for variable in container.get("env", ()):
        why = FORBIDDEN_ON_HEAD.get(variable["name"])
        if why:
            yield f"spec.head.pod.env: {variable['name']} must not be set: {why}"
    version = tuple(int(part) for part in spec["rayVersion"].split(".")[:3])
    if spec.get("authOptions", {}).get("mode") == "token" and version < OLDEST_RAY_WITH_TOKENS:
        yield f"Ray {spec['rayVersion']} is too old for tokens: the operator needs --ray-version 2.52.0 or newer"
