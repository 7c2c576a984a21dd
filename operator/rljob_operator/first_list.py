"""Whether the watches have shown everything there is.

Before that no job may be looked at: one whose cluster is not known yet would get a second. kopf hands on objects one by
one and doesn't say when its first lists are over, unless they are indexed; then it keeps each of them as it came until
the last is there. So the API server itself is asked what there is, in names only, and the watches are complete once
they have shown all of it. Every object counts that is there when they are asked for, however late kopf's own lists are,
and one that was deleted in between is missing from the next answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rljob_operator import names
from rljob_operator.api_server import ApiError, ApiServer

log = logging.getLogger(__name__)

KUEUE = "kueue.x-k8s.io"
LABELLED = (("ray.io", "v1", "rayclusters"), ("", "v1", "pods"))
"""Of these only those that belong to jobs are watched."""
WHOLE = ((names.GROUP, names.VERSION, names.PLURAL), ("", "v1", "persistentvolumeclaims"))
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0


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
            missing = [uid for uid in await _uids(api, namespaces) if uid not in self._seen]
        except ApiError as error:
            log.warning("what there is could not be listed: %s", error)
            await asyncio.sleep(patience)
            return False
        while missing:
            before = len(missing)
            await asyncio.sleep(patience)
            missing = [uid for uid in missing if uid not in self._seen]
            if len(missing) == before:
                return False
        return True


async def _uids(api: ApiServer, namespaces: Sequence[str]) -> list[str]:
    kinds = [(kind, "") for kind in WHOLE] + [(kind, names.JOB_LABEL) for kind in LABELLED]
    version = await _preferred_version(api, KUEUE)
    if version:
        kinds.append(((KUEUE, version, "workloads"), ""))
    found = []
    for (group, version, plural), selector in kinds:
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        paths = [f"{root}/namespaces/{namespace}/{plural}" for namespace in namespaces] or [f"{root}/{plural}"]
        for path in paths:
            try:
                found += [metadata["uid"] async for metadata in api.metadata(path, selector)]
            except ApiError as error:
                # A kind that isn't installed has no objects.
                if not error.not_found:
                    raise
    return found


async def _preferred_version(api: ApiServer, group: str) -> str:
    """The one that kopf watches; empty when the group isn't installed."""
    try:
        return str((await api.get(f"/apis/{group}"))["preferredVersion"]["version"])
    except ApiError as error:
        if error.not_found:
            return ""
        raise
