"""kopf's part: watch jobs and what they are made of, keep the store up to date, and put keys into the queue. No more.

Only `on.event` and `index` handlers are used: they leave no annotations, finalizers or timers on anybody's objects.
The indices exist for one reason: kopf calls no `on.event` handler before everything that is indexed has been listed, so
the first look at a job already knows its clusters and pods.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import kopf

from rljob_operator import names
from rljob_operator.store import Key, Store

KUEUE = "kueue.x-k8s.io"
WATCHED_CHILDREN = (("ray.io", "v1", "rayclusters"), ("", "v1", "pods"))


def registry(store: Store, changed: Callable[[Key], None], connection: kopf.ConnectionInfo) -> kopf.OperatorRegistry:
    """Handlers that feed the store and report every job for which something has changed."""
    handlers = kopf.OperatorRegistry()

    def note(key: Key | None) -> None:
        if key is not None:
            changed(key)

    @kopf.on.login(registry=handlers)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return connection

    @kopf.index(names.GROUP, names.VERSION, names.PLURAL, registry=handlers)
    async def jobs(body: kopf.Body, **_: Any) -> None:
        store.put_job(dict(body))

    @kopf.index("ray.io", "v1", "rayclusters", labels={names.JOB_LABEL: kopf.PRESENT}, registry=handlers)
    async def clusters(body: kopf.Body, **_: Any) -> None:
        store.put_cluster(dict(body))

    @kopf.index("", "v1", "pods", labels={names.JOB_LABEL: kopf.PRESENT}, registry=handlers)
    async def pods(body: kopf.Body, **_: Any) -> None:
        store.put_pod(dict(body))

    @kopf.index("", "v1", "persistentvolumeclaims", registry=handlers)
    async def claims(body: kopf.Body, **_: Any) -> None:
        store.put_claim(dict(body))

    # Whichever version of Kueue's API is preferred: what is read of it is the same in all. Without Kueue it is empty.
    @kopf.index(KUEUE, "workloads", registry=handlers)
    async def workloads(body: kopf.Body, **_: Any) -> None:
        store.put_workload(dict(body))

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=handlers)
    async def job_changed(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        note(store.drop_job(body) if event["type"] == "DELETED" else store.put_job(body))

    @kopf.on.event("ray.io", "v1", "rayclusters", labels={names.JOB_LABEL: kopf.PRESENT}, registry=handlers)
    async def cluster_changed(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        note(store.drop_cluster(body) if event["type"] == "DELETED" else store.put_cluster(body))

    @kopf.on.event("", "v1", "pods", labels={names.JOB_LABEL: kopf.PRESENT}, registry=handlers)
    async def pod_changed(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        note(store.drop_pod(body) if event["type"] == "DELETED" else store.put_pod(body))

    @kopf.on.event("", "v1", "persistentvolumeclaims", registry=handlers)
    async def claim_changed(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        for key in store.drop_claim(body) if event["type"] == "DELETED" else store.put_claim(body):
            changed(key)

    @kopf.on.event(KUEUE, "workloads", registry=handlers)
    async def workload_changed(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        note(store.drop_workload(body) if event["type"] == "DELETED" else store.put_workload(body))

    return handlers


class Endless:
    """Pauses between tries of a read, without end.

    kopf's own list is over after a minute, and the operator with it; an API server may be away for longer.
    """

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1, 2, 4)
        yield from itertools.repeat(8)


def settings() -> kopf.OperatorSettings:
    """kopf's settings: watch only what is ours on the server's side, write nothing, say little."""
    chosen = kopf.OperatorSettings()
    for child in WATCHED_CHILDREN:
        chosen.watching.label_selectors[child] = names.JOB_LABEL
    chosen.watching.chunk_size = 500
    chosen.posting.enabled = False
    chosen.networking.request_timeout = 30
    chosen.networking.error_backoffs = Endless()
    return chosen
