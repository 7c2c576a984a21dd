"""Leader election by a Lease: of several replicas one acts, the others watch and wait.

Times are the 10/7/2 rule: a leader that can't renew for 7 s stops acting, a lease that wasn't renewed for 10 s is free,
and everybody looks every 2 s. Only durations on one's own clock count, so clocks may differ.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from rljob_operator import api_server
from rljob_operator.api_server import ApiError, ApiServer

log = logging.getLogger(__name__)

LEASE_SECONDS = 10.0
RENEW_SECONDS = 7.0
RETRY_SECONDS = 2.0


class Leader:
    """Holds the lease `name` in `namespace`, or tries to.

    Args:
        on_gain: called whenever this replica begins to lead.
    """

    def __init__(
        self, api: ApiServer, namespace: str, name: str, identity: str, on_gain: Callable[[], None] = lambda: None
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._on_gain = on_gain
        self._until = 0.0
        self._led = False
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0

    @property
    def leads(self) -> bool:
        """Whether this replica may act now. Becomes False by itself when the lease can't be renewed."""
        return time.monotonic() < self._until

    async def run(self) -> None:
        """Takes and renews the lease until cancelled, then gives it back."""
        try:
            while True:
                started = time.monotonic()
                try:
                    async with asyncio.timeout(RENEW_SECONDS - RETRY_SECONDS):
                        held = await self._take()
                except (ApiError, TimeoutError) as error:
                    log.warning("the lease could not be read or renewed: %s", error or "no answer in time")
                else:
                    # On a busy machine the time can have run out just before it was renewed. Whoever asked meanwhile
                    # was told that this replica doesn't lead, and did nothing: that is a new beginning, too.
                    self._led = self._led and self.leads
                    self._until = started + RENEW_SECONDS if held else 0.0
                if self.leads and not self._led:
                    log.info("%s is the leader", self._identity)
                    self._on_gain()
                self._led = self.leads
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            if self.leads:
                self._until = 0.0
                await self._give_back()

    async def _take(self) -> bool:
        path = api_server.group("coordination.k8s.io/v1", self._namespace, "leases")
        try:
            lease = await self._api.get(f"{path}/{self._name}")
        except ApiError as error:
            if not error.not_found:
                raise
            lease = {"metadata": {"name": self._name, "namespace": self._namespace}, "spec": {}}
        spec = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        if holder and holder != self._identity and not self._expired(holder, str(spec.get("renewTime", ""))):
            return False
        body = self._lease(lease, spec, changed=holder != self._identity)
        try:
            if "resourceVersion" in lease["metadata"]:
                await self._api.replace(f"{path}/{self._name}", body)
            else:
                await self._api.create(path, body)
        except ApiError as error:
            if error.conflict:
                return False
            raise
        return True

    def _expired(self, holder: str, renewed: str) -> bool:
        """Whether somebody else's lease hasn't moved for its whole duration, as seen from here."""
        if self._seen != (holder, renewed):
            self._seen, self._seen_at = (holder, renewed), time.monotonic()
        return time.monotonic() - self._seen_at >= LEASE_SECONDS

    def _lease(self, lease: dict[str, Any], spec: dict[str, Any], *, changed: bool) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        transitions = int(spec.get("leaseTransitions") or 0) + (1 if changed else 0)
        fresh = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(LEASE_SECONDS),
            "acquireTime": now if changed else spec.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": lease["metadata"],
            "spec": fresh,
        }

    async def _give_back(self) -> None:
        """Lets the next replica lead at once. Failing at it costs ten seconds, not correctness."""
        path = f"{api_server.group('coordination.k8s.io/v1', self._namespace, 'leases')}/{self._name}"
        try:
            async with asyncio.timeout(RETRY_SECONDS):
                lease = await self._api.get(path)
                if lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"]["holderIdentity"] = ""
                    await self._api.replace(path, lease)
        except (ApiError, TimeoutError) as error:
            log.info("the lease could not be released: %s", error)
