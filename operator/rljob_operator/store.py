"""What is known of the cluster's objects: filled by watches and by the answers to our own writes.

Holding our own writes as soon as they are answered means that a decision never rests on something older than what this
operator itself has done, however late the watch is. Plain synchronous data, used from one event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from rljob_operator import names
from rljob_operator.observed import ClusterView, JobView, PodView
from rljob_operator.views import cluster_view, job_view, pod_view, trimmed_pod

Key = tuple[str, str]
"""Namespace and name of a job."""
REMEMBERED_DELETIONS = 10_000


class Store:
    """Jobs by key; their clusters and pods by key and UID."""

    def __init__(self) -> None:
        self._jobs: dict[Key, Mapping[str, Any]] = {}
        self._views: dict[Key, JobView] = {}
        self._outdated: set[Key] = set()
        """Jobs whose view is older than they are."""
        self._clusters: dict[Key, dict[str, Mapping[str, Any]]] = {}
        self._pods: dict[Key, dict[str, Mapping[str, Any]]] = {}
        self._deleted: OrderedDict[str, None] = OrderedDict()

    def jobs(self) -> list[Key]:
        return list(self._jobs)

    def put_job(self, raw: Mapping[str, Any]) -> Key:
        key = (raw["metadata"]["namespace"], raw["metadata"]["name"])
        if self._is_news(self._jobs.get(key), raw):
            self._jobs[key] = raw
            self._outdated.add(key)
        return key

    def put_cluster(self, raw: Mapping[str, Any]) -> Key | None:
        return self._put(self._clusters, raw, raw)

    def put_pod(self, raw: Mapping[str, Any]) -> Key | None:
        return self._put(self._pods, raw, trimmed_pod(raw))

    def drop_job(self, raw: Mapping[str, Any]) -> Key:
        key = (raw["metadata"]["namespace"], raw["metadata"]["name"])
        self._forget(raw)
        known = self._jobs.get(key)
        if known is not None and known["metadata"]["uid"] == raw["metadata"]["uid"]:
            del self._jobs[key]
            self._views.pop(key, None)
            self._outdated.discard(key)
        return key

    def drop_cluster(self, raw: Mapping[str, Any]) -> Key | None:
        return self._drop(self._clusters, raw)

    def drop_pod(self, raw: Mapping[str, Any]) -> Key | None:
        return self._drop(self._pods, raw)

    def job(self, key: Key) -> JobView | None:
        raw = self._jobs.get(key)
        if raw is None:
            return None
        if key in self._outdated:
            self._views[key] = job_view(raw, self._views.get(key))
            self._outdated.discard(key)
        return self._views[key]

    def clusters(self, key: Key, uid: str) -> tuple[ClusterView, ...]:
        """The clusters of this very job, not of a former one of the same name."""
        found = self._clusters.get(key, {}).values()
        mine = [raw for raw in found if raw["metadata"]["labels"].get(names.JOB_UID_LABEL) == uid]
        return tuple(sorted((cluster_view(raw) for raw in mine), key=lambda cluster: cluster.incarnation))

    def pods(self, key: Key) -> tuple[PodView, ...]:
        """All pods of a job. Pods whose cluster is gone count too: they still run."""
        views = (pod_view(raw) for raw in self._pods.get(key, {}).values())
        return tuple(sorted(views, key=lambda pod: pod.name))

    def _put(
        self, kind: dict[Key, dict[str, Mapping[str, Any]]], raw: Mapping[str, Any], kept: Mapping[str, Any]
    ) -> Key | None:
        key = _owner(raw)
        if key is None:
            return None
        objects = kind.setdefault(key, {})
        uid = raw["metadata"]["uid"]
        if self._is_news(objects.get(uid), raw):
            objects[uid] = kept
        return key

    def _drop(self, kind: dict[Key, dict[str, Mapping[str, Any]]], raw: Mapping[str, Any]) -> Key | None:
        key = _owner(raw)
        self._forget(raw)
        if key is not None and key in kind:
            kind[key].pop(raw["metadata"]["uid"], None)
            if not kind[key]:
                del kind[key]
        return key

    def _forget(self, raw: Mapping[str, Any]) -> None:
        self._deleted[raw["metadata"]["uid"]] = None
        while len(self._deleted) > REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)

    def _is_news(self, known: Mapping[str, Any] | None, raw: Mapping[str, Any]) -> bool:
        """Whether `raw` is newer. Resource versions are comparable numbers (guaranteed since Kubernetes 1.35)."""
        if raw["metadata"]["uid"] in self._deleted:
            return False
        if known is None or known["metadata"]["uid"] != raw["metadata"]["uid"]:
            return True
        return int(raw["metadata"]["resourceVersion"]) > int(known["metadata"]["resourceVersion"])


def _owner(raw: Mapping[str, Any]) -> Key | None:
    """The job an object belongs to, by its label."""
    metadata = raw["metadata"]
    job = metadata.get("labels", {}).get(names.JOB_LABEL)
    return (metadata["namespace"], job) if job else None
