"""One job's walk through chance: edits, losses, ends of drivers; and a bad network that also kills the operator.

Everything that is decided is decided by a seed, so a walk can be walked again (only the timing differs). `history` says
what was done.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from fakes.bad_network import BadNetwork
from fakes.heads import Driver, Play
from kube.control_plane import ApiCallError
from world import World, job_document

Destiny = Literal["succeeds", "suspends", "runs", "is deleted"]
DESTINIES: tuple[Destiny, ...] = ("succeeds", "succeeds", "suspends", "runs", "is deleted")
STATUSES = (409, 429, 500, 503, 504)
AT_ONCE = 20
STEPS = 15


class Chaos:
    """What happens to the operator of a world while this is entered: a fifth of all writes go wrong in some way.

    An operator that has ended is started again.
    """

    def __init__(self, world: World, network: BadNetwork, seed: int) -> None:
        self._world = world
        self._network = network
        self._dice = random.Random(seed)
        self._done = asyncio.Event()
        self.kills = 0
        self.faults = 0

    async def __aenter__(self) -> Chaos:
        network = self._network
        network.before, network.after, network.lose_answer = self._before, self._after, self._lose
        self._tasks = [asyncio.create_task(self._revive()), asyncio.create_task(self._cut())]
        return self

    async def __aexit__(self, *_: object) -> None:
        network = self._network
        network.before = lambda _number, _method, _path: None
        network.after = lambda _number, _method, _path: None
        network.lose_answer = lambda _number: False
        self._done.set()
        await asyncio.gather(*self._tasks)
        # One that was killed a moment ago is still alive, and nobody would start the next one.
        if self._world.operator is not None and self._world.operator.ending:
            await self._world.stop_operator()
        if self._world.operator is None or not self._world.operator.alive:
            self._world.start_operator(network.address)

    def _before(self, _number: int, _method: str, _path: str) -> int | None:
        if self._dice.random() >= 0.15:
            return None
        self.faults += 1
        return self._dice.choice(STATUSES)

    def _after(self, _number: int, _method: str, _path: str) -> None:
        operator = self._world.operator
        if operator is not None and operator.alive and self._dice.random() < 0.03:
            self.kills += 1
            operator.cancel()

    def _lose(self, _number: int) -> bool:
        lost = self._dice.random() < 0.05
        self.faults += lost
        return lost

    async def _revive(self) -> None:
        while not self._done.is_set():
            # Killed by us it may be; an operator that fails by itself would be started again for ever.
            if self._world.operator is not None and self._world.operator.failure is not None:
                raise self._world.operator.failure
            if self._world.operator is None or not self._world.operator.alive:
                self._world.start_operator(self._network.address)
            await asyncio.sleep(0.02)

    async def _cut(self) -> None:
        while not self._done.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._done.wait(), self._dice.uniform(0.5, 3.0))
            self._network.cut_watches()


@dataclass
class Walk:
    """One job and what chance does to it."""

    world: World
    seed: int
    history: list[str] = field(default_factory=list)
    replicas: int = 2

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self.name = f"chaos-{self.seed}"
        self.destiny: Destiny = self._dice.choice(DESTINIES)
        self.play = Play(steps=None, checkpoints=self._dice.random() < 0.5)

    async def begin(self) -> None:
        self.replicas = self._dice.randint(1, 3)
        document = job_document(
            self.name,
            rollout={"replicas": self.replicas, "maxReplicas": 4, "minReplicas": 1},
            retry={"limit": 1000, "backoffSeconds": 0},
            suspend=self._dice.random() < 0.1,
        )
        self.history.append(f"created with {self.replicas} engines")
        await self.world.apply(document, self.play)

    async def stagger(self, steps: int) -> None:
        """That many moves, with pauses in which everybody else acts."""
        moves = (self._scale, self._scale, self._suspend, self._resume, self._end_driver, self._end_driver, self._crash)
        moves += (self._lose_pod, self._evict, self._delete_cluster, self._edit, self._drain)
        for _ in range(steps):
            move = self._dice.choice(moves)
            # Somebody else may have been faster: the job's cluster or pod is gone by now.
            with suppress(ApiCallError):
                await move()
            self.assert_each_attempt_once()
            await asyncio.sleep(self._dice.uniform(0.05, 0.6))

    async def arrive(self) -> None:
        """With no more trouble the job gets where it shall."""
        self.history.append(f"quiet; it {self.destiny}")
        self.play.drains = True
        if self.destiny == "is deleted":
            await self.world.delete(self.name)
            await self.world.until(f"{self.name} is gone", self._nothing_is_left)
        elif self.destiny == "suspends":
            await self._write({"suspend": True})
            await self.world.until_condition(self.name, "Suspended", "True")
            await self.world.until(f"{self.name} is freed", self._nothing_runs)
        else:
            await self._write({"suspend": False})
            if self.destiny == "succeeds":
                self.play.steps = 1
                await self.world.until_condition(self.name, "Succeeded", "True")
                await self.world.until(f"{self.name} is freed", self._nothing_runs)
            else:
                await self.world.until(f"{self.name} has its size and one driver", self._runs_as_wanted)
        self.assert_each_attempt_once()

    def assert_each_attempt_once(self) -> None:
        """No number is submitted twice, and later attempts have higher numbers."""
        attempts = [driver.attempt for driver in self.world.drivers(self.name)]
        assert attempts == sorted(set(attempts)), (self.name, attempts, self.history)

    async def assert_one_driver_at_most(self) -> None:
        """Two drivers must never work for one job at once: a running one lives as long as its head pod."""
        heads = {pod["metadata"]["uid"] for pod in await self._pods() if _is_head(pod)}
        running = [driver for driver in self._running() if driver.head in heads]
        assert len(running) <= 1, (self.name, running, self.history)

    # Moves

    async def _scale(self) -> None:
        self.replicas = self._dice.randint(1, 4)
        await self._write({"rollout": {"replicas": self.replicas}})

    async def _suspend(self) -> None:
        await self._write({"suspend": True})

    async def _resume(self) -> None:
        await self._write({"suspend": False})

    async def _edit(self) -> None:
        await self._write({"deadlines": {"startSeconds": self._dice.randint(1000, 2000)}})

    async def _drain(self) -> None:
        self.play.drains = not self.play.drains
        self.history.append(f"drains: {self.play.drains}")

    async def _end_driver(self) -> None:
        code = self._dice.choice((1, 75, 137))
        self.history.append(f"driver ends with {code}")
        for driver in self._running()[-1:]:
            driver.exit_code, driver.state = code, "FAILED"

    async def _crash(self) -> None:
        """The container of some pod ends by itself."""
        pod = await self._some_pod()
        if pod is not None:
            self.history.append(f"{pod['metadata']['name']} crashes")
            path = f"/api/v1/namespaces/{self.world.namespace}/pods/{pod['metadata']['name']}/status"
            status = {"phase": "Failed", "conditions": [{"type": "Ready", "status": "False"}]}
            await self.world.call("PATCH", path, {"status": status}, "application/merge-patch+json")

    async def _evict(self) -> None:
        pod = await self._some_pod()
        if pod is not None:
            self.history.append(f"{pod['metadata']['name']} is evicted")
            path = f"/api/v1/namespaces/{self.world.namespace}/pods/{pod['metadata']['name']}/status"
            status = {"phase": "Failed", "reason": "Evicted", "conditions": [{"type": "Ready", "status": "False"}]}
            await self.world.call("PATCH", path, {"status": status}, "application/merge-patch+json")

    async def _lose_pod(self) -> None:
        pod = await self._some_pod()
        if pod is not None:
            self.history.append(f"{pod['metadata']['name']} is deleted")
            path = f"/api/v1/namespaces/{self.world.namespace}/pods/{pod['metadata']['name']}"
            await self.world.call("DELETE", path, {"gracePeriodSeconds": 0})

    async def _delete_cluster(self) -> None:
        for cluster in await self._mine("/apis/ray.io/v1", "rayclusters"):
            self.history.append(f"{cluster['metadata']['name']} is deleted")
            path = f"/apis/ray.io/v1/namespaces/{self.world.namespace}/rayclusters/{cluster['metadata']['name']}"
            await self.world.call("DELETE", path, {"propagationPolicy": "Background"})

    # Looking

    async def _write(self, spec: dict[str, Any]) -> None:
        self.history.append(str(spec))
        await self.world.patch(self.name, spec)

    def _running(self) -> list[Driver]:
        return [driver for driver in self.world.drivers(self.name) if driver.state == "RUNNING"]

    async def _mine(self, root: str, plural: str) -> list[dict[str, Any]]:
        path = f"{root}/namespaces/{self.world.namespace}/{plural}?labelSelector=rljob.dev%2Fjob%3D{self.name}"
        return list((await self.world.call("GET", path))["items"])

    async def _pods(self) -> list[dict[str, Any]]:
        return await self._mine("/api/v1", "pods")

    async def _some_pod(self) -> dict[str, Any] | None:
        pods = sorted(await self._pods(), key=lambda pod: str(pod["metadata"]["name"]))
        return self._dice.choice(pods) if pods else None

    async def _nothing_runs(self) -> bool:
        return not await self._mine("/apis/ray.io/v1", "rayclusters") and not await self._pods()

    async def _nothing_is_left(self) -> bool:
        kinds = (("/api/v1", "configmaps"), ("/api/v1", "secrets"), ("/apis/rljob.dev/v1alpha1", "rljobs"))
        for root, plural in kinds:
            if any(item["metadata"]["name"].startswith(self.name) for item in await self._mine(root, plural)):
                return False
        return await self._nothing_runs()

    async def _runs_as_wanted(self) -> bool:
        pods = await self._pods()
        alive = [pod for pod in pods if pod["status"].get("phase") == "Running" and not _is_going(pod)]
        heads = [pod for pod in alive if _is_head(pod)]
        engines = [pod for pod in alive if pod["metadata"]["labels"]["ray.io/group"] == "rollout"]
        if (len(heads), len(engines), len(alive), len(pods)) != (1, self.replicas, self.replicas + 2, len(alive)):
            return False
        running = [d for d in self._running() if d.head == heads[0]["metadata"]["uid"]]
        job = await self.world.job(self.name)
        said = {item["type"]: item["reason"] for item in job.get("status", {}).get("conditions", ())}
        return len(running) == 1 and (said.get("Running"), said.get("Resizing")) == ("Training", "AtSize")


async def walk_all(world: World, network: BadNetwork, begin: int, runs: int) -> None:
    """Walks with `runs` seeds from `begin`, some at a time; says which didn't arrive, with their history."""
    lost = []
    for first in range(begin, begin + runs, AT_ONCE):
        walks = [Walk(world, seed) for seed in range(first, min(first + AT_ONCE, begin + runs))]
        async with Chaos(world, network, first) as chaos:
            for walk in walks:
                await walk.begin()
            ended = asyncio.Event()
            watch = asyncio.create_task(_watch(walks, ended))
            try:
                await asyncio.gather(*(walk.stagger(STEPS) for walk in walks))
            finally:
                ended.set()
                await watch
        results = await asyncio.gather(*(walk.arrive() for walk in walks), return_exceptions=True)
        print(f"seeds from {first}: {chaos.kills} kills, {chaos.faults} faults, {network.writes} writes")
        assert chaos.kills + chaos.faults > 0
        for walk, result in zip(walks, results, strict=True):
            if isinstance(result, BaseException):
                story = "\n  ".join(walk.history)
                lost.append(f"seed {walk.seed}: {result}\n  {story}")
        await world.remove_jobs()
    assert not lost, f"{len(lost)} of {runs} didn't arrive:\n" + "\n".join(lost)


async def _watch(walks: list[Walk], ended: asyncio.Event) -> None:
    while not ended.is_set():
        for walk in walks:
            await walk.assert_one_driver_at_most()
        await asyncio.sleep(0.2)


def _is_head(pod: dict[str, Any]) -> bool:
    return bool(pod["metadata"]["labels"]["ray.io/node-type"] == "head")


def _is_going(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]
