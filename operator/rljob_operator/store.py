"""What is known of the cluster's objects: filled by watches and by the answers to our own writes.

Holding our own writes as soon as they are answered means that a decision never rests on something older than what this
operator itself has done, however late the watch is. Plain synchronous data, used from one event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rljob_operator import names
from rljob_operator.observed import ClaimView, ClusterView, JobView, PodView
from rljob_operator.queueing import QueueView, queue_view
from rljob_operator.storage import used_claims
from rljob_operator.views import (
    claim_view,
    cluster_view,
    job_view,
    pod_view,
    trimmed_claim,
    trimmed_cluster,
    trimmed_job,
    trimmed_pod,
    trimmed_workload,
    workload_owner,
    workload_view,
)

Key = tuple[str, str]
"""Namespace and name of a job."""
Trim = Callable[[Mapping[str, Any]], Mapping[str, Any]]
REMEMBERED_DELETIONS = 10_000
REMEMBERED_VIEWS = 1_000


class Store:
    """Jobs by key; their clusters and pods by key and UID; claims by name."""

    def __init__(self) -> None:
        self._jobs: dict[Key, Mapping[str, Any]] = {}
        self._views: OrderedDict[Key, JobView] = OrderedDict()
        """Views of the jobs that were looked at last: a view takes several times the memory of what it is made of."""
        self._outdated: set[Key] = set()
        """Jobs whose view is older than they are."""
        self._clusters: dict[Key, dict[str, Mapping[str, Any]]] = {}
        self._pods: dict[Key, dict[str, Mapping[str, Any]]] = {}
        self._workloads: dict[str, dict[str, Mapping[str, Any]]] = {}
        """Workloads by the UID of their cluster and their own."""
        self._jobs_of: dict[str, Key] = {}
        """The job of each cluster, by the cluster's UID."""
        self._claims: dict[Key, Mapping[str, Any]] = {}
        """The claims, by their namespace and name."""
        self._named: dict[Key, frozenset[str]] = {}
        """The claims that a job names, as far as it has been looked at."""
        self._users: dict[Key, set[Key]] = {}
        """The jobs that name a claim: `_named` the other way round."""
        self._deleted: OrderedDict[str, int | None] = OrderedDict()
        """What is gone, by UID, and up to which version: None: for good."""

    def jobs(self) -> list[Key]:
        return list(self._jobs)

    def namespaces(self) -> set[str]:
        """The namespaces that have jobs."""
        return {namespace for namespace, _ in self._jobs}

    def known(self) -> dict[str, list[Mapping[str, Any]]]:
        """All objects, as far as they are kept, by the plural of their kind."""
        return {
            names.PLURAL: list(self._jobs.values()),
            "rayclusters": _flat(self._clusters.values()),
            "pods": _flat(self._pods.values()),
            "persistentvolumeclaims": list(self._claims.values()),
            "workloads": _flat(self._workloads.values()),
        }

    def drop(self, plural: str, raw: Mapping[str, Any]) -> set[Key]:
        """Forgets an object that was not listed, of which `known`'s form is enough; returns the jobs for which that is
        news. It may only have lost the label that it is listed by: a newer version with the label is news again."""
        if plural == "persistentvolumeclaims":
            keys = self.drop_claim(raw)
        else:
            drops = {
                names.PLURAL: self.drop_job,
                "rayclusters": self.drop_cluster,
                "pods": self.drop_pod,
                "workloads": self.drop_workload,
            }
            key = drops[plural](raw)
            keys = set() if key is None else {key}
        self._deleted[raw["metadata"]["uid"]] = int(raw["metadata"]["resourceVersion"])
        return keys

    # What puts or drops an object returns the job, or the jobs, for which that is news.

    def put_job(self, raw: Mapping[str, Any]) -> Key | None:
        key = (raw["metadata"]["namespace"], raw["metadata"]["name"])
        if not self._is_news(self._jobs.get(key), raw):
            return None
        self._jobs[key] = trimmed_job(raw)
        self._outdated.add(key)
        return key

    def put_cluster(self, raw: Mapping[str, Any]) -> Key | None:
        key = self._put(self._clusters, raw, trimmed_cluster)
        if key is not None:
            self._jobs_of[raw["metadata"]["uid"]] = key
        return key

    def put_pod(self, raw: Mapping[str, Any]) -> Key | None:
        return self._put(self._pods, raw, trimmed_pod)

    def put_claim(self, raw: Mapping[str, Any]) -> set[Key]:
        """Takes a PersistentVolumeClaim."""
        name = (raw["metadata"]["namespace"], raw["metadata"]["name"])
        if not self._is_news(self._claims.get(name), raw):
            return set()
        self._claims[name] = trimmed_claim(raw)
        return self._users.get(name, set())

    def drop_claim(self, raw: Mapping[str, Any]) -> set[Key]:
        name = (raw["metadata"]["namespace"], raw["metadata"]["name"])
        self._forget(raw)
        known = self._claims.get(name)
        if known is not None and known["metadata"]["uid"] == raw["metadata"]["uid"]:
            del self._claims[name]
        return self._users.get(name, set())

    def put_workload(self, raw: Mapping[str, Any]) -> Key | None:
        """Takes a Workload of Kueue's: it was made for the cluster of a job."""
        cluster = workload_owner(raw)
        if not cluster:
            return None
        uid = raw["metadata"]["uid"]
        if not self._is_news(self._workloads.get(cluster, {}).get(uid), raw):
            return None
        self._workloads.setdefault(cluster, {})[uid] = trimmed_workload(raw)
        return self._jobs_of.get(cluster)

    def drop_workload(self, raw: Mapping[str, Any]) -> Key | None:
        cluster = workload_owner(raw)
        self._forget(raw)
        known = self._workloads.get(cluster, {})
        known.pop(raw["metadata"]["uid"], None)
        if not known:
            self._workloads.pop(cluster, None)
        return self._jobs_of.get(cluster)

    def queue(self, cluster_uid: str) -> QueueView:
        """What Kueue says about a cluster."""
        return queue_view([workload_view(raw) for raw in self._workloads.get(cluster_uid, {}).values()])

    def drop_job(self, raw: Mapping[str, Any]) -> Key:
        key = (raw["metadata"]["namespace"], raw["metadata"]["name"])
        self._forget(raw)
        known = self._jobs.get(key)
        if known is not None and known["metadata"]["uid"] == raw["metadata"]["uid"]:
            del self._jobs[key]
            self._views.pop(key, None)
            self._note_claims(key, frozenset())
            self._outdated.discard(key)
        return key

    def drop_cluster(self, raw: Mapping[str, Any]) -> Key | None:
        self._jobs_of.pop(raw["metadata"]["uid"], None)
        return self._drop(self._clusters, raw)

    def drop_pod(self, raw: Mapping[str, Any]) -> Key | None:
        return self._drop(self._pods, raw)

    def job(self, key: Key) -> JobView | None:
        raw = self._jobs.get(key)
        if raw is None:
            return None
        view = self._views.get(key)
        if view is None or key in self._outdated:
            view = self._views[key] = job_view(raw, view)
            self._outdated.discard(key)
            named = used_claims(view.job) if view.job is not None else ()
            self._note_claims(key, frozenset(claim.name for claim in named))
        self._views.move_to_end(key)
        if len(self._views) > REMEMBERED_VIEWS:
            self._views.popitem(last=False)
        return view

    def claims(self, key: Key) -> tuple[ClaimView, ...]:
        """The claims that a job names, as far as they exist."""
        found = (self._claims.get((key[0], name)) for name in sorted(self._named.get(key, ())))
        return tuple(claim_view(raw) for raw in found if raw is not None)

    def clusters(self, key: Key, uid: str) -> tuple[ClusterView, ...]:
        """The clusters of this very job, not of a former one of the same name."""
        found = self._clusters.get(key, {}).values()
        mine = [raw for raw in found if raw["metadata"]["labels"].get(names.JOB_UID_LABEL) == uid]
        return tuple(sorted((cluster_view(raw) for raw in mine), key=lambda cluster: cluster.incarnation))

    def pods(self, key: Key) -> tuple[PodView, ...]:
        """All pods of a job. Pods whose cluster is gone count too: they still run."""
        views = (pod_view(raw) for raw in self._pods.get(key, {}).values())
        return tuple(sorted(views, key=lambda pod: pod.name))

    def _note_claims(self, key: Key, named: frozenset[str]) -> None:
        before = self._named.pop(key, frozenset())
        if named:
            self._named[key] = named
        for name in before - named:
            users = self._users[key[0], name]
            users.discard(key)
            if not users:
                del self._users[key[0], name]
        for name in named - before:
            self._users.setdefault((key[0], name), set()).add(key)

    def _put(self, kind: dict[Key, dict[str, Mapping[str, Any]]], raw: Mapping[str, Any], trimmed: Trim) -> Key | None:
        key = _owner(raw)
        uid = raw["metadata"]["uid"]
        if key is None or not self._is_news(kind.get(key, {}).get(uid), raw):
            return None
        kind.setdefault(key, {})[uid] = trimmed(raw)
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
        version = int(raw["metadata"]["resourceVersion"])
        if raw["metadata"]["uid"] in self._deleted:
            last = self._deleted[raw["metadata"]["uid"]]
            if last is None or version <= last:
                return False
        if known is None or known["metadata"]["uid"] != raw["metadata"]["uid"]:
            return True
        return version > int(known["metadata"]["resourceVersion"])


def _flat(kinds: Iterable[Mapping[str, Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    return [raw for objects in kinds for raw in objects.values()]


def _owner(raw: Mapping[str, Any]) -> Key | None:
    """The job an object belongs to, by its label."""
    metadata = raw["metadata"]
    job = metadata.get("labels", {}).get(names.JOB_LABEL)
    return (metadata["namespace"], job) if job else None
