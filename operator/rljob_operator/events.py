"""Kubernetes events: a line in `kubectl describe` for what changed, at most one per reason and job a minute.

They are of the core group: `kubectl describe` sorts by `lastTimestamp`, which the API server refuses in those of
events.k8s.io/v1.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from rljob_api import API_VERSION, KIND
from rljob_operator import api_server
from rljob_operator.actions import Event
from rljob_operator.api_server import ApiError, ApiServer
from rljob_operator.observed import JobView

log = logging.getLogger(__name__)

PAUSE_SECONDS = 60.0
MOST_KEPT = 10_000
"""Most events of which is remembered when they were told. What is beyond is kept for a minute only."""
LONGEST_NOTE = 1024
"""Bytes of a note that events.k8s.io/v1 takes. In the core group there is no limit, and nobody reads more."""
CONTROLLER = "rljob.dev/operator"


class Poster:
    """Posts events. A lost event is a pity and nothing more, so errors are logged and forgotten."""

    def __init__(self, api: ApiServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._last: dict[tuple[str, str], float] = {}
        self._instance = f"{socket.gethostname()}-{os.getpid()}"[:128]

    async def post(self, job: JobView, events: Sequence[Event]) -> None:
        now = self._clock()
        if len(self._last) > MOST_KEPT:
            self._last = {key: when for key, when in self._last.items() if now - when < PAUSE_SECONDS}
        for event in events:
            if now - self._last.get((job.uid, event.reason), -PAUSE_SECONDS) < PAUSE_SECONDS:
                continue
            self._last[job.uid, event.reason] = now
            try:
                await self._api.create(api_server.core(job.namespace, "events"), self._body(job, event))
            except ApiError as error:
                log.info("%s/%s: the event %s could not be posted: %s", job.namespace, job.name, event.reason, error)

    def _body(self, job: JobView, event: Event) -> dict[str, object]:
        now = time.time_ns()
        second = datetime.fromtimestamp(now // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "apiVersion": "v1",
            "kind": "Event",
            # Events of one second are shown in the order of their names.
            "metadata": {"name": f"{job.name}.{now:016x}", "namespace": job.namespace},
            "firstTimestamp": second,
            "lastTimestamp": second,
            "count": 1,
            "source": {"component": CONTROLLER},
            "reportingComponent": CONTROLLER,
            "reportingInstance": self._instance,
            "action": "Reconcile",
            "type": event.kind,
            "reason": event.reason,
            "message": _cut(event.message),
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": job.namespace,
                "name": job.name,
                "uid": job.uid,
            },
        }


def _cut(text: str) -> str:
    whole = text.encode(errors="replace")
    if len(whole) <= LONGEST_NOTE:
        return whole.decode()
    # A letter that is cut in two is left out.
    return whole[: LONGEST_NOTE - len("…".encode())].decode(errors="ignore") + "…"
