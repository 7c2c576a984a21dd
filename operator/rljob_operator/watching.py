"""kopf's part: watch jobs and what they are made of, keep the store up to date, and put keys into the queue. No more.

Only `on.event` handlers are used: they leave no annotations, finalizers or timers on anybody's objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Never

import kopf
from kubernetes.aio.client.configuration import Configuration

from rljob_operator import credentials, names
from rljob_operator.api_server import LIST_CHUNK
from rljob_operator.inventory import KUEUE, LABELLED, UnwatchedError
from rljob_operator.store import Key, Store


def registry(
    store: Store, changed: Callable[[Key], None], saw: Callable[[str, str], None], configuration: Configuration
) -> kopf.OperatorRegistry:
    """Handlers that feed the store, report every job for which something has changed, and of all that they saw the
    plural of its kind and its UID."""
    handlers = kopf.OperatorRegistry()

    def note(plural: str, event: kopf.RawEvent, *keys: Key | None) -> None:
        saw(plural, event["object"]["metadata"]["uid"])
        for key in keys:
            if key is not None:
                changed(key)

    @kopf.on.login(registry=handlers)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await credentials.connection(configuration)

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=handlers)
    async def job_changed(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        note(names.PLURAL, event, store.drop_job(body) if event["type"] == "DELETED" else store.put_job(body))

    @kopf.on.event("ray.io", "v1", "rayclusters", labels={names.JOB_LABEL: kopf.PRESENT}, registry=handlers)
    async def cluster_changed(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        note("rayclusters", event, store.drop_cluster(body) if event["type"] == "DELETED" else store.put_cluster(body))

    @kopf.on.event("", "v1", "pods", labels={names.JOB_LABEL: kopf.PRESENT}, registry=handlers)
    async def pod_changed(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        note("pods", event, store.drop_pod(body) if event["type"] == "DELETED" else store.put_pod(body))

    @kopf.on.event("", "v1", "persistentvolumeclaims", registry=handlers)
    async def claim_changed(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        users = store.drop_claim(body) if event["type"] == "DELETED" else store.put_claim(body)
        note("persistentvolumeclaims", event, *users)

    # Whichever version of Kueue's API is preferred: what is read of it is the same in all. Without Kueue it is empty.
    @kopf.on.event(KUEUE, "workloads", registry=handlers)
    async def workload_changed(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        note("workloads", event, store.drop_workload(body) if event["type"] == "DELETED" else store.put_workload(body))

    return handlers


LONGEST_CAUSE = 500
"""Characters of an error that are told."""


class NoDifferences(kopf.DiffBaseStorage):
    """No handler asks what has changed in an object; kopf would copy each of them to find out."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        pass


class Endless:
    """Pauses between tries of a read, without end.

    kopf's own list is over after a minute, and the operator with it; an API server may be away for longer. When it is
    back the status shall have caught up within ten seconds, so no watch waits for most of them.
    """

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1, 2)
        yield from itertools.repeat(4)


def settings() -> kopf.OperatorSettings:
    """kopf's settings: watch only what is ours on the server's side, write nothing, say little."""
    chosen = kopf.OperatorSettings()
    for child in LABELLED:
        chosen.watching.label_selectors[child] = names.JOB_LABEL
    chosen.watching.chunk_size = LIST_CHUNK
    chosen.posting.enabled = False
    chosen.persistence.diffbase_storage = NoDifferences()
    # For so long kopf keeps an object after it has handed it on, with a task for it.
    chosen.queueing.idle_timeout = 0.1
    chosen.networking.request_timeout = 30
    chosen.networking.error_backoffs = Endless()
    return chosen


async def watch(handlers: kopf.OperatorRegistry, namespaces: Sequence[str], identity: str) -> Never:
    """Watches these namespaces (none: all) until cancelled.

    Raises:
        UnwatchedError: the API server has refused a watch, or told of an error in one, and kopf has given up; says why.
            An API server that is away, busy, or has forgotten the version asked for ("410 Gone" in a watch) is no such
            error: kopf lists and watches anew.
    """
    ends = "the operator exits to be restarted"
    try:
        await kopf.operator(
            registry=handlers,
            settings=settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            # kopf's own would ask for the user's name, and a container's user has none. Its type isn't exported.
            identity=identity,  # type: ignore[arg-type]
        )
    except Exception as error:  # kopf exports none of its own, and has logged where it comes from
        raise UnwatchedError(f"the watches have ended ({error!r:.{LONGEST_CAUSE}}); {ends}") from error
    raise UnwatchedError(f"the watches have ended; {ends}")
