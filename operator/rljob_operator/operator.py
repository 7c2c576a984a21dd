"""The operator as one asynchronous process: watches, queue, executor, leader election and probes, wired together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

import aiohttp
from kubernetes.aio.client.configuration import Configuration

from rljob_operator import watching
from rljob_operator.access import Access
from rljob_operator.api_server import ApiError, ApiServer
from rljob_operator.claims import Claims
from rljob_operator.executor import Executor
from rljob_operator.head import DEFAULT_ADDRESS, Heads
from rljob_operator.inventory import FirstList, WatchMonitor, sweep
from rljob_operator.key_secret import KeySecret
from rljob_operator.leader import Leader
from rljob_operator.metrics import Metrics
from rljob_operator.probes import METRICS_PATH, Probes
from rljob_operator.settings import Settings
from rljob_operator.store import Key, Store
from rljob_operator.tokens import KeyRing, TokenKey
from rljob_operator.work_queue import RetryError, WorkQueue

log = logging.getLogger(__name__)

SLOW_HEADS_AT_ONCE = 256
FIRST_PAUSES, LONGEST_PAUSE = (0.5, 1.0, 2.0), 4.0
"""Seconds between two tries to read the keys at the start."""


@dataclass(frozen=True)
class Options:
    """How one process of the operator runs."""

    key_file: Path | None = None
    """A key from which tokens derive, provided by the administrator; None: the operator makes its own."""
    key_secret: str | None = None
    """Secret in `lease_namespace` in which all keys are kept. None: `key_file` has the only one."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: all."""
    head_address: str = DEFAULT_ADDRESS
    lease_namespace: str | None = None
    """Where the leader's lease lies; None: this process is alone and always acts."""
    lease_name: str = "rljob-operator"
    identity: str = "rljob-operator"
    probe_host: str = "0.0.0.0"
    probe_port: int | None = 8080
    open_metrics: bool = False
    """/metrics is for everybody who reaches the port, not only for those whom the cluster lets."""
    workers: int = 32
    settings: Settings = field(default_factory=Settings)


class Operator:
    """One replica. `run` returns only when cancelled or when a part of it fails for good."""

    def __init__(self, options: Options, configuration: Configuration) -> None:
        self._options = options
        self._configuration = configuration
        self._first_list = FirstList()
        self._listening = WatchMonitor()
        self.store = Store()
        self.metrics = Metrics()
        self.queue: WorkQueue[Key] = WorkQueue(self._look, workers=options.workers)
        self.queue.on_error = self._count_error
        self._leader: Leader | None = None
        self._claims: Claims | None = None
        self._executor: Executor | None = None
        self._key_secret: KeySecret | None = None

    async def run(self) -> None:
        options = self._options
        connector = aiohttp.TCPConnector(limit=SLOW_HEADS_AT_ONCE)
        # Cookies of one head must never reach another.
        jar = aiohttp.DummyCookieJar()
        async with (
            ApiServer(self._configuration) as api,
            aiohttp.ClientSession(connector=connector, cookie_jar=jar) as http,
        ):
            if options.lease_namespace is not None:
                self._leader = Leader(
                    api, options.lease_namespace, options.lease_name, options.identity, on_gain=self._begin_to_lead
                )
                me = f"{options.lease_namespace}/{options.lease_name}"
                self._claims = Claims(api, me, lambda: self.leads, self.store.namespaces, self._look_at_all)
            self._check_keys()
            access = None if options.open_metrics else Access(api, METRICS_PATH)
            probes = Probes(self.metrics, lambda: self._first_list.complete, self._refresh_metrics, access)
            async with asyncio.TaskGroup() as group:
                if options.probe_port is not None:
                    # First of all: it is alive while it waits for an API server.
                    group.create_task(probes.run(options.probe_host, options.probe_port), name="probes")
                keys = await self._read_keys(api)
                self._executor = Executor(
                    api,
                    Heads(http, options.head_address),
                    self.store,
                    keys,
                    options.settings,
                    may_act=self.acts_in,
                )
                self._executor.on_decision = self.metrics.take
                group.create_task(self._watch(), name="watch")
                group.create_task(self._take_stock(api), name="inventory")
                group.create_task(self._listening.run(api, options.namespaces), name="listening")
                group.create_task(self.queue.run(), name="queue")
                if self._key_secret is not None:
                    group.create_task(self._key_secret.keep(), name="keys")
                if self._leader is not None:
                    group.create_task(self._leader.run(), name="leader")
                if self._claims is not None:
                    group.create_task(self._claims.run(), name="claims")

    def _check_keys(self) -> None:
        options = self._options
        if options.key_secret is None and options.key_file is None:
            raise ValueError("tokens need a key: set a file (--key-file), or a Secret to keep it in (--key-secret)")
        if options.key_secret is not None and options.lease_namespace is None:
            raise ValueError("--key-secret needs --lease-namespace, the namespace of the Secret")

    async def _read_keys(self, api: ApiServer) -> Callable[[], KeyRing]:
        """What hands out the keys of the moment; the first ones are there when this returns.

        As long as the API server is away, or does not let the operator at its Secret, it waits: were it to end, the
        kubelet would start it anew with pauses of up to five minutes.
        """
        options = self._options
        if options.key_secret is None:
            assert options.key_file is not None
            alone = KeyRing((await asyncio.to_thread(TokenKey.read, options.key_file),))
            return lambda: alone
        assert options.lease_namespace is not None
        kept = self._key_secret = KeySecret(api, options.lease_namespace, options.key_secret, options.key_file)
        told = ""
        for pause in chain(FIRST_PAUSES, repeat(LONGEST_PAUSE)):
            try:
                first = await kept.look()
            except ApiError as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("nothing is done until the token keys are read: %s", told)
                await asyncio.sleep(pause)
            else:
                break
        return lambda: kept.ring or first

    @property
    def leads(self) -> bool:
        """Whether this replica acts."""
        if self._options.lease_namespace is None:
            return True
        return self._leader is not None and self._leader.leads

    def acts_in(self, namespace: str) -> bool:
        """Whether this replica acts on the jobs of a namespace: it leads, and no other installation has them."""
        return self.leads and (self._claims is None or self._claims.holds(namespace))

    async def _watch(self) -> None:
        handlers = watching.registry(self.store, self._changed, self._saw, self._configuration)
        await watching.watch(handlers, self._options.namespaces, self._options.identity)

    def _saw(self, plural: str, uid: str) -> None:
        self._first_list.saw(uid)
        self._listening.heard(plural)

    async def _take_stock(self, api: ApiServer) -> None:
        namespaces = self._options.namespaces
        await self._first_list.wait(api, namespaces)
        self._look_at_all()
        await sweep(self.store, self._changed, api, namespaces, self._options.settings.sweep_seconds)

    def _changed(self, key: Key) -> None:
        if self.leads and self._first_list.complete:
            self.queue.add(key)

    def _begin_to_lead(self) -> None:
        if self._claims is not None:
            self._claims.wake()
        self.queue.relieve()
        self._look_at_all()

    def _look_at_all(self, namespace: str | None = None) -> None:
        if self.leads and self._first_list.complete:
            for key in self.store.jobs():
                if namespace in (None, key[0]):
                    self.queue.add(key)

    async def _look(self, key: Key) -> float | None:
        assert self._executor is not None
        if self._claims is not None and self._claims.other(key[0]):
            return await self._leave_alone(key, self._claims)
        with self.metrics.seconds.time():
            later = await self._executor.look(key)
        self.metrics.looks.labels("done").inc()
        if self.store.job(key) is None:
            self.queue.forget(key)
            self.metrics.forget(*key)
            return None
        return later

    async def _leave_alone(self, key: Key, claims: Claims) -> float | None:
        """A job of a namespace that is another installation's is told so, and that is all."""
        self.metrics.forget(*key)
        job = self.store.job(key)
        if job is None:
            self.queue.forget(key)
            return None
        return await claims.tell(job) if self.leads else None

    def _count_error(self, _key: Key, error: BaseException) -> None:
        self.metrics.looks.labels("retry" if isinstance(error, RetryError) else "error").inc()

    def _refresh_metrics(self) -> None:
        self.metrics.queue.set(len(self.queue))
        self.metrics.queue_wait.set(self.queue.longest_wait)
        self.metrics.leads.set(self.leads)
        self.metrics.others = dict(self._claims.others) if self._claims is not None and self.leads else {}
        if not self.leads:
            self.metrics.forget_all()
