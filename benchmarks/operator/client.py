"""A bare asynchronous client: the least that the writes can cost, and the eyes of every measurement."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.operator.plane import NAMESPACE, ControlPlane
from rljob_api import API_VERSION, KIND
from rljob_operator import api_server, names, objects
from rljob_operator.network_policy import network_policy
from rljob_operator.observed import Observed
from rljob_operator.reconcile import reconcile
from rljob_operator.settings import Settings
from rljob_operator.tokens import TokenKey
from rljob_operator.views import job_view

Object = dict[str, Any]
AT_ONCE = 32
"""Calls at once; the operator has as many workers."""
APPLY = "application/apply-patch+yaml"
JOBS = f"/apis/rljob.dev/v1alpha1/namespaces/{NAMESPACE}/rljobs"
NETWORKING = "networking.k8s.io/v1"
CLUSTERS = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters"


def job_document(name: str) -> Object:
    """A small job with two engines and one trainer pod."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "model": {"source": "s3://models/tiny"},
            "data": {"train": {"source": "s3://data/train.jsonl"}, "prompt": "question", "answer": "answer"},
            "reward": {"functions": [{"type": "gsm8k"}]},
            "algorithm": {"preset": "grpo"},
            "placement": "separate",
            "rollout": {"replicas": 2, "maxReplicas": 8, "minReplicas": 1},
            "trainer": {"replicas": 1},
            "checkpoint": {"uri": "/state"},
        },
    }


@dataclass(frozen=True)
class Write:
    """One call, its body ready to be sent."""

    method: str
    path: str
    content: str
    body: bytes


class Client:
    """Calls with a kept pool of connections. Use as an asynchronous context manager."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        # Two more for the watches.
        connector = aiohttp.TCPConnector(ssl=False, limit=AT_ONCE + 2)
        headers = {"Authorization": f"Bearer {self._plane.token}", "Accept": "application/json"}
        timeout = aiohttp.ClientTimeout(total=None, connect=30)
        self._session = aiohttp.ClientSession(self._plane.server, connector=connector, headers=headers, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(self, write: Write) -> bytes:
        """The answer's body. Raises ``RuntimeError`` for any HTTP error."""
        assert self._session is not None
        headers = {"Content-Type": write.content}
        async with self._session.request(write.method, write.path, data=write.body, headers=headers) as response:
            answer = await response.read()
            if response.status >= 400:
                raise RuntimeError(f"{write.method} {write.path}: {response.status} {answer[:500]!r}")
            return answer

    async def get(self, path: str) -> Object:
        answer: Object = json.loads(await self.send(Write("GET", path, "application/json", b"")))
        return answer

    async def watch(self, path: str, take: Callable[[Object, float], None]) -> None:
        """Hands on every object that is added or changed, with the moment it came, until cancelled.

        A watch that the server ends, because we read slower than it writes, goes on where it was. Raises
        ``RuntimeError`` when the server refuses.
        """
        assert self._session is not None
        version = "0"
        while True:
            query = {"watch": "true", "resourceVersion": version}
            async with self._session.get(path, params=query) as response:
                if response.status == 429:  # its cache of a kind that is new has to be filled first
                    await asyncio.sleep(0.2)
                    continue
                if response.status >= 400:
                    raise RuntimeError(f"watching {path}: {response.status} {(await response.read())[:500]!r}")
                rest = b""
                async for chunk in response.content.iter_any():
                    moment = time.perf_counter()
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        if event["type"] == "ERROR":  # that version is too old by now: begin with what there is
                            version = "0"
                            break
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] in ("ADDED", "MODIFIED"):
                            take(event["object"], moment)


async def all_at_once(calls: Iterable[Callable[[], Awaitable[Any]]]) -> None:
    """Runs them with `AT_ONCE` at a time, in order."""
    waiting = iter(list(calls))

    async def work() -> None:
        for call in waiting:
            await call()

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())


async def make_jobs(client: Client, names_: Sequence[str]) -> None:
    """Creates RLJobs."""

    def call(name: str) -> Callable[[], Awaitable[Any]]:
        body = json.dumps(job_document(name)).encode()
        return lambda: client.send(Write("POST", JOBS, "application/json", body))

    await all_at_once(call(name) for name in names_)


def writes_for(raw: Object, key: TokenKey) -> list[Write]:
    """What the operator writes for a new job, ready to be sent: its status and objects."""
    settings = Settings()
    view = job_view(raw)
    assert view.job is not None, view.problems
    config = objects.config_map(view.job, view.document, view.uid, view.generation)
    secret = objects.secret(view.job, view.uid, 1, key.tokens(view.uid, 1))
    policy = network_policy(view.job, view.uid, settings)
    cluster = objects.ray_cluster(view.job, view.fingerprint, view.uid, view.generation, 1, key.id, settings)
    status = reconcile(Observed(view, (), ()), view.created, settings).status
    assert status is not None
    whole = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": view.name, "namespace": view.namespace},
        "status": status.document(),
    }
    space, query = view.namespace, "?fieldManager=bare&force=true"

    def apply(path: str, body: Object) -> Write:
        return Write("PATCH", path + query, APPLY, json.dumps(body).encode())

    return [
        apply(api_server.jobs(space, view.name, "status"), whole),
        apply(api_server.core(space, "configmaps", config["metadata"]["name"]), config),
        Write("POST", api_server.core(space, "secrets"), "application/json", json.dumps(secret).encode()),
        apply(api_server.group(NETWORKING, space, "networkpolicies", policy["metadata"]["name"]), policy),
        Write("POST", api_server.clusters(space), "application/json", json.dumps(cluster).encode()),
    ]


@dataclass
class Arrivals:
    """When each job got its RayCluster and its first status, as a watch saw it (perf_counter seconds)."""

    clusters: dict[str, float] = field(default_factory=dict)
    statuses: dict[str, float] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: BaseException | None = None

    def take_cluster(self, raw: Object, moment: float) -> None:
        self.clusters.setdefault(raw["metadata"]["labels"][names.JOB_LABEL], moment)
        self._changed.set()

    def take_job(self, raw: Object, moment: float) -> None:
        if raw.get("status"):
            self.statuses.setdefault(raw["metadata"]["name"], moment)
        self._changed.set()

    def watch_ended(self, task: asyncio.Task[None]) -> None:
        self._failure = None if task.cancelled() else task.exception()
        self._changed.set()

    async def until(self, count: int, seconds: float) -> None:
        """Waits until so many jobs have both. Raises ``TimeoutError``, or what ended a watch."""
        async with asyncio.timeout(seconds):
            while min(len(self.clusters), len(self.statuses)) < count:
                if self._failure is not None:
                    raise self._failure
                self._changed.clear()
                await self._changed.wait()

    @property
    def first(self) -> float:
        return min(*self.clusters.values(), *self.statuses.values())

    @property
    def last(self) -> float:
        return max(*self.clusters.values(), *self.statuses.values())


class Watching:
    """Both watches while entered."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []
        self.arrivals = Arrivals()

    async def __aenter__(self) -> Arrivals:
        watch = self._client.watch
        self._tasks = [
            asyncio.create_task(watch(CLUSTERS, self.arrivals.take_cluster)),
            asyncio.create_task(watch(JOBS, self.arrivals.take_job)),
        ]
        for task in self._tasks:
            task.add_done_callback(self.arrivals.watch_ended)
        return self.arrivals

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
