"""The age bound under random timings: the real loop, schedule and pool, with engines that are slow, come, go and die.

Everything but the engines' and the learner's work is the code that runs in production; time is virtual. In each
scenario engines differ in speed, responses have long tails, engines join, are drained and are lost, rewards take their
time, and the trainer is now faster, now slower than the engines. In half of them an episode is a program that calls a
tool, with a long tail too; late groups are waited for, ended or dropped. Whatever happens:

- no group is older than maxAge when it is trained (by the versions that its tokens carry);
- no group waits for longer than maxAge versions after its admission (nobody starves);
- every prompt is trained exactly once, or dropped because it was late where the job says so;
- the run ends (virtual time notices a deadlock at once).

A few hundred scenarios run by default. Ten thousand:

    RLJOB_TIMINGS=10000 .venv/bin/python -m pytest -n 2 tests/trainer/pipeline/test_random_timings.py
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from virtual_engine import VirtualEngine

from rljob_api.spec.pipeline import OnDeadline
from rljob_trainer.episodes.environment import Environment, Task
from rljob_trainer.episodes.episode import Group, Prompt, RewardResult
from rljob_trainer.episodes.group import GenerationSettings, GroupRollout
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.log import EpisodeLog
from rljob_trainer.episodes.play import EpisodeLimits, Voice
from rljob_trainer.episodes.programs import Programs
from rljob_trainer.episodes.record import EpisodeRecord, RecordedCall
from rljob_trainer.episodes.requests import SamplingSettings
from rljob_trainer.episodes.single_turn import SingleTurn
from rljob_trainer.pipeline.loop import Pipeline
from rljob_trainer.pipeline.parts import NoJournal, StepRecord, TrainedBatch
from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.publish.quiet import Publication, QuietPublication
from rljob_trainer.simulation.clock import run_virtual
from rljob_trainer.weights.manifest import Version
from rljob_trainer.world import protocol

pytestmark = pytest.mark.integrity

SCENARIOS = int(os.environ.get("RLJOB_TIMINGS", "240"))
FIRST = int(os.environ.get("RLJOB_SEED", "0"))
PATIENCE = 2000.0
"""Virtual seconds, ten times the longest response: who waits longer waits for ever."""
PARTS = 24
"""Tests that share the scenarios, so that several processes can."""


@dataclass(slots=True)
class Scenario:
    """What one seed comes to."""

    rng: random.Random
    max_age: int
    partial: str
    shape: ScheduleSettings
    prompts: int
    n: int
    tail: float
    troubles: int
    training: float
    """Mean seconds of one pull."""
    admitted: dict[int, int] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    mixed: int = 0
    lost: int = 0
    tools: float | None = None
    """Mean virtual seconds of a tool; None: an episode is one answer."""
    late: int = 0
    dropped: list[int] = field(default_factory=list)
    ended: int = 0
    """Trained episodes that were ended because their group was late."""

    @classmethod
    def of(cls, seed: int) -> Scenario:
        rng = random.Random(seed)
        max_age = seed % 9
        pull, pulls = rng.randint(1, 5), rng.choice([1, 1, 2, 4])
        fraction = rng.choice([None, None, 0.1, 0.5, 1.0]) if max_age else None
        ordered = max_age < 2 and rng.random() < 0.3
        on_deadline: OnDeadline = random.Random(-seed).choice(["wait", "end", "end", "drop"])
        return cls(
            rng=rng,
            max_age=max_age,
            partial=rng.choice(["none", "recompute", "keepCache"]) if max_age and not ordered else "none",
            shape=ScheduleSettings(pull * pulls, pull, max_age, fraction, ordered, on_deadline),
            prompts=rng.randint(8, 60),
            n=rng.choice([1, 2, 3]),
            tail=rng.choice([0.1, 0.8, 1.6]),
            troubles=rng.choice([0, 0, 2, 5]),
            training=rng.choice([0.01, 1.0, 5.0]),
            tools=random.Random(-seed - 1).choice([None, None, 1.0, 10.0]),
        )


class Feed:
    def __init__(self, prompts: int) -> None:
        self.left, self.ordinal = prompts, 0

    async def prepare(self, prompts: int) -> bool:
        return True

    def next(self) -> Prompt | None:
        if self.ordinal == self.left:
            return None
        self.ordinal += 1
        return Prompt(self.ordinal - 1, 0, self.ordinal - 1, "test", "", (1,), None)

    def state_dict(self) -> dict[str, object]:
        return {}


class Journal(NoJournal):
    """Notes what is dropped."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    def dropped(self, group: Group, reason: str) -> None:
        assert reason == "deadline"
        self._scenario.dropped.append(group.prompt.ordinal)


class Memory(EpisodeLog):
    """A log that keeps nothing on a disk, whose thread would know no virtual time."""

    def __init__(self) -> None:
        self.records = {}

    def begin(self, id: EpisodeId, program: str) -> EpisodeRecord:
        return EpisodeRecord(program)

    def put(self, id: EpisodeId, call: RecordedCall) -> None:
        pass

    def synced(self) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


class Ids:
    """Programs here ask with token ids."""

    is_there, answer_end, marks_end = False, "", False

    def render(self, messages: Any, tools: Any = None, *, generation: bool = True) -> str:
        raise AssertionError

    def encode(self, text: str) -> list[int]:
        raise AssertionError

    def decode(self, ids: Sequence[int]) -> str:
        return ""


def environment_of(scenario: Scenario) -> Environment:
    if scenario.tools is None:
        return SingleTurn()
    mean, rng = scenario.tools, random.Random(scenario.prompts)

    async def tool() -> int:
        await asyncio.sleep(mean * rng.lognormvariate(-0.72, 1.2))
        return 7

    async def program(task: Task, model: Voice, world: protocol.World) -> None:
        first = await model.ask(task.prompt.token_ids, max_tokens=50)
        observed = await world.call("tool", tool)
        await model.ask([*first.context, observed])

    return Programs(program, Memory(), Ids(), EpisodeLimits(turns=2, prompt_tokens=10))


class Rewards:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._in_processes = rng.random() < 0.5

    def in_processes(self, source: str) -> bool:
        return self._in_processes

    async def score(self, group: Group) -> list[RewardResult]:
        await asyncio.sleep(self._rng.choice([0.0, 0.1, 2.0]))
        return [RewardResult(0.0) for _ in group.episodes]


class World:
    """The pool, its publication, and what happens to its engines."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._rng = scenario.rng
        self._started = 0
        self._sending = asyncio.Lock()
        self.pool = RolloutPool(
            max_outstanding=scenario.rng.choice([2, 4, 64]), replace=self._replacement, bring_up=self._bring_up
        )
        for _ in range(scenario.rng.randint(1, 4)):
            self.pool.add(self._engine())
        self.pool.activate([engine.name for engine in self.pool.engines])

    async def publish(self, version: int) -> dict[str, float]:
        async with self._sending:
            await asyncio.sleep(self._rng.choice([0.0, 0.2]))
            names = []
            for engine in self.pool.engines:
                assert isinstance(engine, VirtualEngine)
                engine.load(version)
                names.append(engine.name)
                if self.scenario.partial == "keepCache":
                    await asyncio.sleep(0.01)  # not all at the same moment
            delivered = Version(version, "")
            self.pool.delivered(names, delivered)
            self.pool.present(delivered)
            self.pool.activate(names)
        return {}

    async def trouble(self) -> None:
        """Engines join, are drained, and are lost, at random moments."""
        for _ in range(self.scenario.troubles):
            await asyncio.sleep(self._rng.expovariate(0.3))
            event = self._rng.choice(["join", "lose", "drain"])
            serving = [engine.name for engine in self.pool.serving]
            if event == "join":
                engine = self._engine()
                self.pool.add(engine)
                await self._bring_up(engine)
            elif event == "lose" and serving:
                self._named(self._rng.choice(serving)).kill()
            elif event == "drain" and len(serving) > 1:
                await self.pool.remove(self._rng.choice(serving))

    def _named(self, name: str) -> Any:
        return next(engine for engine in self.pool.engines if engine.name == name)

    def _engine(self) -> VirtualEngine:
        self._started += 1
        speed = self._rng.choice([1.0, 4.0, 16.0])
        return VirtualEngine(f"{self._started:03d}", self._rng, speed, self.pool.version, self.scenario.tail)

    async def _replacement(self, name: str) -> VirtualEngine:
        await asyncio.sleep(self._rng.choice([0.1, 5.0]))
        return self._engine()

    async def _bring_up(self, handle: Any) -> None:
        await asyncio.sleep(self._rng.choice([0.0, 1.0]))
        # As the real publication does it: one transfer at a time, and none to an engine that a publication has reached.
        async with self._sending:
            if handle in self.pool.engines and handle not in self.pool.serving:
                handle.version = self.pool.version
                if self.pool.published is not None:
                    self.pool.delivered([handle.name], self.pool.published)
                self.pool.activate([handle.name])


class Trainer:
    """Sleeps, and checks what it is given."""

    def __init__(self, scenario: Scenario, publication: Publication) -> None:
        self._scenario, self._publication = scenario, publication

    async def train(self, groups: Sequence[Group], *, step: int, version: int) -> TrainedBatch:
        scenario = self._scenario
        for group in groups:
            ordinal, age = group.prompt.ordinal, version - group.oldest_version
            assert 0 <= age <= scenario.max_age, f"prompt {ordinal} is {age} versions old"
            waited = version - scenario.admitted[ordinal]
            assert waited <= scenario.max_age, f"prompt {ordinal} waited for {waited} versions"
            scenario.ages.append(age)
            scenario.ended += sum(episode.finish == "deadline" for episode in group.episodes)
            scenario.mixed += any(leaf.tokens.versions.min() < leaf.tokens.versions.max() for leaf in group.leaves)
            scenario.trained.append(ordinal)
        await asyncio.sleep(scenario.training * scenario.rng.lognormvariate(0, 0.5))
        return TrainedBatch()

    async def publish(self, version: int) -> dict[str, float]:
        return await self._publication.publish(version)


async def go_on(record: StepRecord) -> bool:
    return True


async def play(scenario: Scenario) -> None:
    world = World(scenario)
    sampling = SamplingSettings(max_tokens=200)
    rollout = GroupRollout(
        environment_of(scenario),
        world.pool,
        Rewards(scenario.rng),
        lambda responses: [""] * len(responses),
        GenerationSettings(scenario.n, sampling, seed=1),
    )
    publication: Publication = world
    if scenario.partial != "keepCache":
        interrupt = scenario.partial == "recompute"
        publication = QuietPublication(world, world.pool, interrupt=interrupt, seconds=PATIENCE)
    schedule = Schedule(scenario.shape)
    admit = schedule.admitted

    def admitted(ordinal: int, serving_version: int) -> None:
        scenario.admitted[ordinal] = serving_version
        admit(ordinal, serving_version)

    schedule.admitted = admitted  # type: ignore[method-assign]
    pipeline = Pipeline(
        Feed(scenario.prompts),
        rollout,
        Trainer(scenario, publication),
        schedule,
        after_step=go_on,
        journal=Journal(scenario),
        sample_deadline_seconds=PATIENCE,
    )
    trouble = asyncio.create_task(world.trouble())
    try:
        await pipeline.run()
    finally:
        trouble.cancel()
        scenario.lost = len(world.pool.lost)
        scenario.late = pipeline.take_late()
        await world.pool.close()
    assert sorted(scenario.trained + scenario.dropped) == list(range(scenario.prompts))
    if scenario.shape.on_deadline == "wait":
        assert not scenario.late
        assert not scenario.dropped
        assert not scenario.ended
    if scenario.shape.on_deadline == "end":
        assert not scenario.dropped  # the models here answer before tools are called


@pytest.mark.parametrize("part", range(PARTS))
def test_the_bound_holds_nobody_starves_and_nothing_is_lost(part: int) -> None:
    for seed in range(FIRST + part, FIRST + SCENARIOS, PARTS):
        scenario = Scenario.of(seed)
        try:
            run_virtual(play(scenario))
        except BaseException as error:
            error.add_note(f"scenario {seed}: {scenario.shape}, {scenario.partial}, {scenario.troubles} troubles")
            raise


def test_the_scenarios_are_what_they_are_meant_to_be() -> None:
    """Stale, interrupted, lost: bounds that hold because nothing happens would prove nothing."""
    ages, mixed, lost, dropped, ended = [], 0, 0, 0, 0
    for seed in range(90):
        scenario = Scenario.of(seed)
        run_virtual(play(scenario))
        ages += scenario.ages
        mixed += scenario.mixed
        lost += scenario.lost
        dropped += len(scenario.dropped)
        ended += scenario.ended
    assert max(ages) >= 6
    assert np.mean(ages) > 0.5
    assert mixed > 100
    assert lost > 15
    assert dropped > 15
    assert ended > 10
