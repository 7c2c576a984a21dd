"""What there is, in names only, asked of the API server itself: the watches don't tell everything.

They don't say when they have shown all there is. Before that no job may be looked at: one whose cluster isn't known yet
would get a second. kopf hands on objects one by one, without an end of its first lists unless they are indexed; then it
keeps each of them as it came until the last is there. The watches are complete once they have shown all of what the API
server lists, however late kopf's own lists are; what was deleted in between is missing from the next answer.

And they don't tell of deletions in a time that the API server has forgotten ("410 Gone": it was restarted, or out of
reach for minutes); kopf lists anew then, and what isn't in a list brings no event. A pod that is only remembered would
keep its job waiting for ever. So from time to time what is known is compared with what there is.

And a watch may never have begun. kopf asks once, at its start, which kinds the API server serves, and again only when a
CRD changes. A server that has just started, or to which a CRD is a moment old, answers without kinds that it serves a
moment later, of which nothing would be heard until somebody touches their CRD.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain

from rljob_operator import names
from rljob_operator.api_server import ApiError, ApiServer
from rljob_operator.store import Key, Store

log = logging.getLogger(__name__)

KUEUE = "kueue.x-k8s.io"
LABELLED = (("ray.io", "v1", "rayclusters"), ("", "v1", "pods"))
"""Kinds of which only the objects that belong to jobs are watched."""
WHOLE = ((names.GROUP, names.VERSION, names.PLURAL), ("", "v1", "persistentvolumeclaims"))
CUSTOM = frozenset({names.PLURAL, "rayclusters", "workloads"})
"""The kinds that come with CRDs, by their plurals."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
UNHEARD_SECONDS = 30.0
"""Seconds between two looks for what no watch has told of: kopf's first list may be long."""


class UnwatchedError(RuntimeError):
    """The watches do not tell what there is. This operator has to end; the one that is started in its place watches
    anew."""


class FirstList:
    """Notes what the watches show until it has been all."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._complete = asyncio.Event()

    @property
    def complete(self) -> bool:
        return self._complete.is_set()

    def saw(self, uid: str) -> None:
        """A watch has shown an object, or that it is gone."""
        if not self.complete:
            self._seen.add(uid)

    async def wait(self, api: ApiServer, namespaces: Sequence[str]) -> None:
        """Returns when the watches have shown what there is in these namespaces (none: in all)."""
        pause = FIRST_PAUSE
        while not await self._shown(api, namespaces, pause):
            pause = min(2 * pause, LONGEST_PAUSE)
        self._complete.set()
        self._seen.clear()

    async def _shown(self, api: ApiServer, namespaces: Sequence[str], patience: float) -> bool:
        """Whether all that is there now is shown before patience ends, which begins anew with every object."""
        try:
            listed = await uids(api, namespaces)
        except ApiError as error:
            log.warning("no job is processed until the initial listing succeeds: %s", error)
            await asyncio.sleep(patience)
            return False
        missing = [uid for uid in chain.from_iterable(listed.values()) if uid not in self._seen]
        while missing:
            before = len(missing)
            await asyncio.sleep(patience)
            missing = [uid for uid in missing if uid not in self._seen]
            if len(missing) == before:
                return False
        return True


class WatchMonitor:
    """Notices a watch that has never begun."""

    def __init__(self) -> None:
        self._heard: set[str] = set()

    def heard(self, plural: str) -> None:
        """A watch has told of something of that kind."""
        self._heard.add(plural)

    async def run(self, api: ApiServer, namespaces: Sequence[str]) -> None:
        """Returns when every kind that a CRD brings has been heard of: of such a kind nothing has to be asked any more.

        Raises:
            UnwatchedError: there is something of a kind, was there at the look before, and no watch has told of any.
        """
        before: Mapping[str, set[str]] = {}
        while silent := CUSTOM - self._heard:
            await asyncio.sleep(UNHEARD_SECONDS)
            try:
                listed = await uids(api, namespaces, silent)
            except ApiError as error:
                log.info("listing failed: %s", error)
                continue
            for plural in sorted(silent - self._heard):
                if before.get(plural, set()) & listed.get(plural, set()):
                    raise UnwatchedError(
                        f"there are {plural}, but no watch covers them: the API server did not list this kind when "
                        "the operator started; the operator exits to be restarted"
                    )
            before = listed


async def sweep(
    store: Store, changed: Callable[[Key], None], api: ApiServer, namespaces: Sequence[str], seconds: float
) -> None:
    """About every so many seconds, until cancelled, the store drops what isn't there any more."""
    while True:
        await asyncio.sleep(seconds * random.uniform(0.8, 1.2))
        try:
            await sweep_once(store, changed, api, namespaces)
        except ApiError as error:
            log.info("listing failed: %s", error)


async def sweep_once(store: Store, changed: Callable[[Key], None], api: ApiServer, namespaces: Sequence[str]) -> None:
    """Drops from the store what was known before the question and is not in the answer.

    Raises:
        ApiError: there is no answer; nothing is dropped.
    """
    known = store.known()
    listed = await uids(api, namespaces)
    for plural, objects in known.items():
        # A kind that isn't served says nothing about its objects: just after its start a server doesn't know it yet.
        gone = [raw for raw in objects if plural in listed and raw["metadata"]["uid"] not in listed[plural]]
        for raw in gone:
            log.info("%s %s is gone, but no watch reported it", plural, raw["metadata"]["name"])
            for key in store.drop(plural, raw):
                changed(key)


async def uids(
    api: ApiServer, namespaces: Sequence[str], only: Collection[str] | None = None
) -> Mapping[str, set[str]]:
    """The UIDs of all objects that are watched, by the plural of their kind; kinds that aren't served are missing.

    Args:
        only: the plurals of kinds to ask for, instead of all.
    """
    kinds = [(kind, "") for kind in WHOLE] + [(kind, names.JOB_LABEL) for kind in LABELLED]
    if (only is None or "workloads" in only) and (version := await _preferred_version(api, KUEUE)):
        kinds.append(((KUEUE, version, "workloads"), ""))
    found: dict[str, set[str]] = {}
    for (group, version, plural), selector in kinds:
        if only is not None and plural not in only:
            continue
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        paths = [f"{root}/namespaces/{namespace}/{plural}" for namespace in namespaces] or [f"{root}/{plural}"]
        listed = set()
        try:
            for path in paths:
                listed |= {str(metadata["uid"]) async for metadata in api.metadata(path, selector)}
        except ApiError as error:
            if not error.not_found:
                raise
        else:
            found[plural] = listed
    return found


async def _preferred_version(api: ApiServer, group: str) -> str:
    """The one that kopf watches; empty when the group isn't installed."""
    try:
        return str((await api.get(f"/apis/{group}"))["preferredVersion"]["version"])
    except ApiError as error:
        if error.not_found:
            return ""
        raise
