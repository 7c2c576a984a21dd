"""A colocated run in virtual time on GPUs that know what is on them, whose engines die whenever a test wants it.

Played are the GPUs, the learner's ranks, the engines' processes and the transfer of bytes. Real is who tells them what
to do and when: what ``start_engines`` puts together, the pool, the publication, the turns, the trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tiny_job import copy_job
from virtual_engine import VirtualEngine

from rljob_api import load_jobs, resolve
from rljob_trainer.driver import engines as engines_of_run
from rljob_trainer.driver.engines import Engines, start_engines
from rljob_trainer.driver.training import PipelineTrainer
from rljob_trainer.episodes.episode import Group
from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.requests import GenerationRequest, SamplingSettings
from rljob_trainer.errors import EngineError
from rljob_trainer.learner.residence import Residence
from rljob_trainer.pipeline.parts import TrainedBatch
from rljob_trainer.publish import publication
from rljob_trainer.publish.held_weights import HeldWeights
from rljob_trainer.publish.turns import PublicationInTurns, Turns
from rljob_trainer.rollout.shelf import Shelf
from rljob_trainer.waits import Waits
from rljob_trainer.weights.manifest import Version
from rljob_trainer.weights.receiver import ReceiveReport
from rljob_trainer.weights.sender import SendReport

DEVICE = torch.device("meta")
"""One that is not the host."""
LEARNER = {"actor", "actor optimizer", "critic", "critic optimizer", "reference"}
STARTING, WEIGHTS, CACHE = "an engine that starts", "weights", "cache"
SECONDS = {
    "sleep": 2.0,
    "wake_weights": 1.0,
    "wake": 1.0,
    "weight_ranks": 0.1,
    "join_weights": 1.0,
    "receive_weights": 3.0,
}
"""What engines take for what they are asked."""
START, MOVE, UPDATE = 30.0, 1.5, 20.0
GROUPS, N = 4, 2


class Gpu:
    """What is on a device that a rank and an engine share. Nobody may find there whom he cannot be with."""

    def __init__(self, world: World, sleeps: bool) -> None:
        self.learner: set[str] = set()
        self.engines: dict[str, set[str]] = {}
        self._world, self._sleeps = world, sleeps

    def look(self) -> None:
        there = {part for parts in self.engines.values() for part in parts}
        most = LEARNER
        if STARTING in there or (self._sleeps and CACHE in there):
            most = set()
        elif self._sleeps and WEIGHTS in there:
            most = {"actor"}
        fits = len(self.engines) <= 1 and self.learner <= most
        self._world.expect(fits, f"{sorted(self.learner)} of the learner beside {self.engines}")


class Ranks:
    """One rank for each GPU. Each has its parts moved by the real ``Residence``."""

    bundles = facts = None
    dtype, has_live_model, call_seconds = "float32", False, 600.0

    def __init__(self, world: World) -> None:
        self._world = world
        self.version: int | None = 0
        self.residences = [self._residence(gpu) for gpu in world.gpus]

    @property
    def ranks(self) -> int:
        return len(self.residences)

    def _residence(self, gpu: Gpu) -> Residence:
        gpu.learner |= LEARNER

        def mover(name: str) -> Callable[[torch.device], None]:
            def move(to: torch.device) -> None:
                (gpu.learner.add if to == DEVICE else gpu.learner.discard)(name)
                gpu.look()

            return move

        return Residence(DEVICE, {name: mover(name) for name in LEARNER}, idle_in_host=False)

    async def rest(self, *, actor: bool = True) -> None:
        await asyncio.sleep(MOVE)
        for residence in self.residences:
            residence.evict(actor=actor)
        self._world.happens("the learner rests" if actor else "the actor stays")

    async def wake(self) -> None:
        for residence in self.residences:
            residence.settle()
        await asyncio.sleep(MOVE)
        self._world.happens("the learner wakes")

    async def ask(self) -> None:
        """Scores the canaries."""
        for residence in self.residences:
            with residence.working("actor"):
                pass

    async def run(self, function: Any, *args: Any) -> list[Any]:
        if function.__name__ == "publish":
            version, _, is_new = args
            self.version = version if is_new else self.version
            self._world.expect(version == self.version, "the learner has no such weights")
            await asyncio.sleep(SECONDS["receive_weights"])
            return [SendReport(Version(version, "ab"), 8, 1.0, 0.0, 8) for _ in self.residences]
        await asyncio.sleep(0.5)
        return [f"rank:{rank}" if function.__name__ == "open_publisher" else None for rank in range(self.ranks)]


class PlayedEngine(VirtualEngine):
    """One that takes up room on its GPU."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(name, world.rng, 4.0, 0, 0.8)
        self._world, self._gpu = world, world.gpus[int(name.partition(".")[0])]
        self._parts = {WEIGHTS, CACHE}
        self._has_weights = True
        """Whether those that it has on the device are of any version."""

    async def start(self) -> PlayedEngine:
        world = self._world
        world.engines[self.name] = self
        self._there({STARTING})
        world.happens(f"engine {self.name} starts")
        try:
            if await world.moment("start", self, START):
                raise EngineError(f"engine {self.name} does not start")
            self._check()
        except BaseException:
            self.kill()
            raise
        self._there({WEIGHTS, CACHE})
        return self

    def _there(self, parts: set[str]) -> None:
        self._parts = parts
        self._gpu.engines[self.name] = parts
        self._gpu.look()

    async def within(self, seconds: float, method: Any, *args: Any) -> Any:
        name = method.__name__
        if name in SECONDS:
            await self._world.moment(name, self, SECONDS[name])
        return await super().within(seconds, method, *args)

    def kill(self) -> None:
        super().kill()
        self._gpu.engines.pop(self.name, None)
        self._world.engines.pop(self.name, None)

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._world.expect(self._has_weights and self._parts == {WEIGHTS, CACHE}, "it samples and is not awake")
        super()._submit(requests)

    def _sleep(self, keep_weights: bool) -> None:
        self._world.expect(not keep_weights and not self._running, "it sleeps while it samples")
        self._has_weights = False
        self._there(set())

    def _wake_weights(self) -> None:
        self._there(self._parts | {WEIGHTS})

    def _wake(self) -> None:
        self._world.expect(self._has_weights, "it wakes without weights")
        self._there({WEIGHTS, CACHE})

    def _weight_ranks(self) -> int:
        return 1

    def _join_weights(self, link: Any, first_rank: int, timeout: float) -> None:
        self._world.expect(f"engine {self.name}" in link.names, "it joins others")

    def _receive_weights(self, version: int, timeout: float) -> ReceiveReport:
        self._world.expect(WEIGHTS in self._parts, "weights are loaded where nothing is")
        self.load(version)
        self._has_weights = True
        self._world.happens(f"engine {self.name} has version {version}")
        return ReceiveReport(Version(version, "ab"), 8, 1.0, 0.0, 8)

    def _status(self) -> None:
        """It lives."""


Trouble = Callable[[str, PlayedEngine], bool]
"""Asked in the middle of whatever an engine does, ``start`` or a method of an ``EngineLoop``: whether it goes wrong."""


class World:
    """The run."""

    def __init__(self, gpus: int = 1, *, sleeps: bool = True, trouble: Trouble = lambda what, engine: False) -> None:
        self.rng = Random(gpus)
        self.gpus = [Gpu(self, sleeps) for _ in range(gpus)]
        self.engines: dict[str, PlayedEngine] = {}
        """Those whose process lives."""
        self.seen: list[str] = []
        self.wrong: list[str] = []
        """What should not have happened, whatever became of whoever did it."""
        self.trouble = trouble
        self.steps: list[tuple[int, int]] = []
        """Of each update the version that it trained on, and how many samples of that version it had."""
        self.lost_before = 0
        """Engines that were lost before the last publication began."""
        self.waits: Waits
        self.run: Engines
        self.turns: Turns
        self.trainer: PipelineTrainer
        self._sleeps = sleeps
        self._samples: list[Any] = []
        self._news = asyncio.Event()

    def happens(self, what: str) -> None:
        self.seen.append(what)
        self._news.set()

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)

    async def until(self, what: str) -> None:
        """Until that happens once more."""
        already = self.seen.count(what)
        while self.seen.count(what) == already:
            self._news.clear()
            await self._news.wait()

    async def moment(self, what: str, engine: PlayedEngine, seconds: float) -> bool:
        """Passes ``seconds``; whether what the engine does fails. An engine that does anything but start dies of it."""
        await asyncio.sleep(seconds / 2)
        wrong = self.trouble(what, engine)
        if wrong and what != "start":
            engine.kill()
        await asyncio.sleep(seconds / 2)
        return wrong

    @asynccontextmanager
    async def started(self, folder: Path) -> AsyncIterator[None]:
        """What ``start_engines`` starts, until it is closed."""
        rollout = {"engine": "vllm", "maxResponseTokens": 3, "freeCacheEngine": self._sleeps}
        sections = {"placement": "colocated", "trainer": {"gpusPerReplica": len(self.gpus)}, "rollout": rollout}
        [job] = load_jobs(yaml.safe_dump(copy_job(**sections)))
        self.waits = Waits(asyncio.get_running_loop().time)
        self.learner, self.held = Ranks(self), HeldWeights()
        model: Any = SimpleNamespace(path=folder, address=None, context_length=64)
        learner: Any = self.learner

        async def start(name: str, *_: Any, **__: Any) -> PlayedEngine:
            return await PlayedEngine(self, name).start()

        async def inline(function: Any, *args: Any) -> Any:
            """What is done in a thread, which would know no virtual time."""
            return function(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engines_of_run.RayEngine, "start", start)
            patch.setattr(publication, "call_off", lambda link, reason: None)
            patch.setattr(asyncio, "to_thread", inline)
            self.run = await start_engines(
                resolve(job), model, learner, lambda: self.held.versions, shelf=Shelf(folder), waits=self.waits
            )
            assert self.run.turns is not None
            self.turns = self.run.turns
            in_turns = PublicationInTurns(self.run.publication, self.turns, self.learner.ask)
            step: Any = Step(self)
            self.trainer = PipelineTrainer(step, in_turns, self.turns, undisturbed=self.run.undisturbed, held=self.held)
            try:
                yield
            finally:
                await self.run.close()
            assert not self.wrong

    async def train(self, steps: int) -> None:
        """As the session does: the first weights are published, then each step samples, trains and publishes."""
        await self.turns.to_learner()
        await self.trainer.publish(0)
        for step in range(1, steps + 1):
            asked = [self.run.pool.generate(group_of(step, number)) for number in range(GROUPS)]
            self._samples = [result for group in await asyncio.gather(*asked) for result in group]
            await self.trainer.train([], step=step, version=step - 1)
            self.lost_before = len(self.run.pool.losses)
            await self.trainer.publish(step)

    async def update(self, version: int) -> None:
        """The learner's work."""
        for gpu in self.gpus:
            self.expect(gpu.learner == LEARNER, "the learner works without its state")
        self.learner.version = None
        self.happens("the update begins")
        await asyncio.sleep(UPDATE)
        self.happens("the update ends")
        there = sum(int((result.tokens.versions == version).all()) for result in self._samples)
        self.steps.append((version, there))


class Step:
    """What ``PipelineTrainer`` asks for an update."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def run(self, groups: Sequence[Group], *, number: int, version: int) -> TrainedBatch:
        await self._world.update(version)
        return TrainedBatch()


def group_of(step: int, number: int) -> list[GenerationRequest]:
    """The requests of one prompt, which no other has."""
    ordinal = step * GROUPS + number
    sampling = SamplingSettings(max_tokens=40)
    return [GenerationRequest(EpisodeId(TRAINING, ordinal, i), (1,), sampling, ordinal * N + i) for i in range(N)]
