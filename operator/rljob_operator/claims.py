"""One operator a namespace: who acts where two installations watch the same jobs.

Replicas of one installation share a lease, and one of them leads (`leader`). Two installations, releases of the chart
in different namespaces for example, have a lease each, so both would lead: they would undo each other's writes, and
each would make clusters whose tokens the other cannot use. So an installation claims a namespace before it acts there,
with a Lease that has the same name for everybody, `CLAIM`, and lies in that namespace.

* What is claimed is a namespace that has jobs, as soon as it has one, and no other; whether an installation watches all
  namespaces or some makes no difference. Of two that overlap each keeps what it claimed first, and the claim of a
  namespace without jobs is given back by deleting the Lease.
* The holder is the installation, named by its leader's lease: which replica leads is no news, nor is an upgrade.
* A held claim is renewed every 10 s. Who could not renew it for 20 s stops acting there; one that nobody has renewed
  for 30 s is free. Only durations on one's own clock count, as with the leader's lease. A Lease that somebody deletes
  is nobody's for those who never saw it; who did waits for its time to pass.
* Who finds that another one renews a claim, the second, says so in its log, its metrics (`rljob_other_operator`) and,
  with a Warning event an hour, on each job, and writes nothing else there. When the first has gone away, uninstalled or
  not, the second takes over after those 30 s. Clusters whose token key it lacks are left alone (`TokenRefused`).
* Who may not write Leases there acts on nothing and says that. An operator without a leader's lease says of itself that
  it is alone, and claims nothing.

Each namespace with jobs costs a write every 10 s, like a node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from rljob_operator import api_server, names
from rljob_operator.actions import Event
from rljob_operator.api_server import ApiError, ApiServer
from rljob_operator.events import Poster
from rljob_operator.observed import JobView

log = logging.getLogger(__name__)

CLAIM = f"{names.PLURAL}.{names.GROUP}"
LEASE_SECONDS = 30.0
HOLD_SECONDS = 20.0
RENEW_SECONDS = 10.0
LOOK_SECONDS = 5.0
"""Seconds between two looks at another's claim."""
PAUSE_SECONDS = 2.0
CALL_SECONDS = 5.0
TELL_SECONDS = 3600.0
"""Seconds between two events on a job: for so long an API server keeps them."""
AT_ONCE = 8
MOST_KEPT = 10_000
"""Most jobs of which is remembered when they were told."""


class Claims:
    """The claims of one installation.

    Args:
        me: the installation, the same in all its replicas.
        leads: whether this replica leads; the others claim nothing.
        wanted: the namespaces that have jobs now.
        on_change: called with a namespace that is this installation's from now on, or turns out to be another's.
    """

    def __init__(
        self,
        api: ApiServer,
        me: str,
        leads: Callable[[], bool],
        wanted: Callable[[], Iterable[str]],
        on_change: Callable[[str], None],
    ) -> None:
        self._api = api
        self._me = me
        self._leads = leads
        self._wanted = wanted
        self._on_change = on_change
        self._claims: dict[str, Claim] = {}
        self._wake = asyncio.Event()
        self._poster = Poster(api)
        self._told: dict[str, tuple[str, float]] = {}
        """Which other operator a job was told of, and when, by the job's UID."""

    def holds(self, namespace: str) -> bool:
        """Whether this installation may act there now. Becomes False by itself when a claim can't be renewed."""
        claim = self._claims.get(namespace)
        if claim is None:
            self._wake.set()
        return claim is not None and claim.held

    def other(self, namespace: str) -> str:
        """The other installation that is seen to act there; else empty."""
        claim = self._claims.get(namespace)
        return claim.other if claim is not None else ""

    @property
    def others(self) -> Mapping[str, str]:
        """The namespaces that are another installation's, and whose."""
        return {namespace: claim.other for namespace, claim in self._claims.items() if claim.other}

    def wake(self) -> None:
        """Has claims made or renewed now."""
        self._wake.set()

    async def run(self) -> None:
        """Claims and renews until cancelled. What is held then stays: the next leader of this installation needs it."""
        while True:
            self._wake.clear()
            if self._leads():
                await self._look()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), PAUSE_SECONDS)
            # A thousand jobs that come at once ask a thousand times.
            await asyncio.sleep(0.01)

    async def tell(self, job: JobView) -> float:
        """Says on a job that it is another installation's; returns after how many seconds to say it again."""
        other, now = self.other(job.namespace), time.monotonic()
        told, when = self._told.get(job.uid, ("", 0.0))
        if told != other or now - when >= TELL_SECONDS:
            if len(self._told) > MOST_KEPT:
                self._told = {uid: item for uid, item in self._told.items() if now - item[1] < TELL_SECONDS}
            self._told[job.uid] = other, now
            message = (
                f"another operator ({other}) manages the RLJobs of this namespace; {self._me} does nothing here "
                "while that one is running. Uninstall one of them, or give each its own namespaces (watchNamespaces)"
            )
            await self._poster.post(job, [Event("Warning", "OtherOperator", message)])
            return TELL_SECONDS
        return when + TELL_SECONDS - now

    async def _look(self) -> None:
        wanted = set(self._wanted())
        for namespace in [name for name in self._claims if name not in wanted]:
            await self._claims.pop(namespace).give_back()
        gate = asyncio.Semaphore(AT_ONCE)

        async def look_at(namespace: str) -> None:
            claim = self._claims.setdefault(namespace, Claim(self._api, namespace, self._me))
            before = claim.held, claim.other
            async with gate:
                await claim.look()
            if (claim.held, claim.other) != before:
                self._on_change(namespace)

        await asyncio.gather(*(look_at(namespace) for namespace in sorted(wanted)))


class Claim:
    """The claim of one namespace, held or looked at."""

    def __init__(self, api: ApiServer, namespace: str, me: str) -> None:
        self._api = api
        self._namespace = namespace
        self._me = me
        self._until = 0.0
        self._due = 0.0
        self._lease: dict[str, Any] | None = None
        """The lease as this installation has written it last."""
        self._seen: tuple[str, str] | None = None
        """Somebody else's: holder and time of renewal."""
        self._seen_at = 0.0
        self._problem = ""
        self.other = ""
        """Who was seen to renew it, if that wasn't this installation."""

    @property
    def held(self) -> bool:
        return time.monotonic() < self._until

    async def look(self) -> None:
        """Makes or renews the claim if it is free or held, and is due."""
        started, held = time.monotonic(), self.held
        if started < self._due:
            return
        try:
            async with asyncio.timeout(CALL_SECONDS):
                taken = await self._take()
        except (ApiError, TimeoutError) as error:
            self._lease = None
            self._complain(str(error) or "no answer in time")
            return
        self._problem = ""
        if taken is None:
            return
        if not taken:
            self._until, self._due = 0.0, started + LOOK_SECONDS
            return
        if not held:
            from_whom = f", previously claimed by {self._seen[0]}" if self._seen is not None else ""
            log.info("%s acts in the namespace %s%s", self._me, self._namespace, from_whom)
        self._seen, self.other = None, ""
        self._due, self._until = started + RENEW_SECONDS, started + HOLD_SECONDS

    async def give_back(self) -> None:
        """Deletes a held claim. Failing at it leaves a Lease that is free after its time."""
        lease, held = self._lease, self.held
        self._until = 0.0
        if lease is None or not held:
            return
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._api.delete(self._path(CLAIM), lease["metadata"]["uid"])
        except (ApiError, TimeoutError) as error:
            log.info("the claim of the namespace %s could not be released: %s", self._namespace, error)

    async def _take(self) -> bool | None:
        """None: the Lease is not as it was a moment ago, and the next look says who has it."""
        lease = self._lease or await self._read()
        if lease is None:
            # Deleted while somebody held it: that one may act for a while.
            if self._seen is not None and time.monotonic() - self._seen_at < LEASE_SECONDS:
                return False
            lease = {"metadata": {"name": CLAIM, "namespace": self._namespace, "labels": dict(names.OPERATOR_LABELS)}}
        spec = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        if holder not in ("", self._me) and not self._is_free(holder, str(spec.get("renewTime", ""))):
            return False
        body = self._body(lease, spec, changed=holder != self._me)
        try:
            if "resourceVersion" in lease["metadata"]:
                self._lease = await self._api.replace(self._path(CLAIM), body)
            else:
                self._lease = await self._api.create(self._path(), body)
        except ApiError as error:
            self._lease = None
            if error.conflict or error.not_found:
                return None
            raise
        return True

    async def _read(self) -> dict[str, Any] | None:
        try:
            return await self._api.get(self._path(CLAIM))
        except ApiError as error:
            if error.not_found:
                return None
            raise

    def _is_free(self, holder: str, renewed: str) -> bool:
        """Whether somebody else's claim hasn't moved for its whole duration, as seen from here."""
        if self._seen != (holder, renewed):
            if self._seen is not None and self.other != holder:
                self.other = holder
                log.warning(
                    "another operator (%s) manages the RLJobs of the namespace %s: %s does nothing there while that "
                    "one is running",
                    holder,
                    self._namespace,
                    self._me,
                )
            self._seen, self._seen_at = (holder, renewed), time.monotonic()
        return time.monotonic() - self._seen_at >= LEASE_SECONDS

    def _body(self, lease: dict[str, Any], spec: Mapping[str, Any], *, changed: bool) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        fresh = {
            "holderIdentity": self._me,
            "leaseDurationSeconds": int(LEASE_SECONDS),
            "acquireTime": now if changed else spec.get("acquireTime", now),
            "renewTime": now,
            "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (1 if changed else 0),
        }
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": lease["metadata"],
            "spec": fresh,
        }

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("nothing is done in the namespace %s until it can be claimed: %s", self._namespace, problem)
        self._problem = problem

    def _path(self, name: str = "") -> str:
        return api_server.group("coordination.k8s.io/v1", self._namespace, "leases", name)
