"""Colocated engines and ranks on a GPU: in which order memory changes hands, and what is on the device at each moment.

The learner's parts and the engines are played; who asks them for what, and when, is the real thing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tiny_job import copy_job

from rljob_api import load_jobs, resolve
from rljob_api.resolved import ResolvedJob
from rljob_trainer.driver import engines as engines_of_run
from rljob_trainer.driver.assemble import publication_of
from rljob_trainer.driver.engines import Engines, start_engines
from rljob_trainer.driver.training import PipelineTrainer
from rljob_trainer.episodes.episode import Group
from rljob_trainer.learner.residence import Residence
from rljob_trainer.pipeline.parts import TrainedBatch
from rljob_trainer.publish.engines_turn import EnginesTurn
from rljob_trainer.publish.turns import SharedDevices
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.shelf import Shelf
from rljob_trainer.waits import Waits

GPU = torch.device("meta")
"""A device that is not the host."""
STATE = {"actor optimizer", "critic", "critic optimizer", "reference"}
LEARNER = {"actor", *STATE}
WEIGHTS, CACHE = "engine's weights", "engine's cache"


class Device:
    """What is on it, and what was there when something happened."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.seen: list[tuple[str, set[str]]] = []

    def happens(self, what: str) -> None:
        self.seen.append((what, set(self.there)))


class Learner:
    """A rank's parts, moved by the real ``Residence``."""

    bundles = None

    def __init__(self, device: Device, ranks: int = 1) -> None:
        self.device = device
        self.ranks, self.has_live_model, self.call_seconds = ranks, ranks == 1, 60.0
        device.there |= LEARNER

        def mover(name: str) -> Any:
            return lambda to: device.there.add(name) if to == GPU else device.there.discard(name)

        self.residence = Residence(GPU, {name: mover(name) for name in LEARNER}, idle_in_host=False)

    async def rest(self, *, actor: bool = True) -> None:
        self.residence.evict(actor=actor)

    async def wake(self) -> None:
        self.residence.settle()

    async def ask(self) -> None:
        with self.residence.working("actor"):
            self.device.happens("the learner scores canaries")

    def run_at(self, *_: Any) -> Any:
        """A call of the engine in a rank's process: collects, and never has anything."""
        return SimpleNamespace(future=concurrent.futures.Future)

    async def run(self, function: Any, *args: Any) -> list[Any]:
        self.device.happens(function.__name__)
        return [None for _ in range(self.ranks)]


class Engine:
    """One whose weights are the learner's own has none here."""

    name, place = "0", None

    def __init__(self, device: Device, *, own_weights: bool = True) -> None:
        self.device, self.weights = device, {WEIGHTS} if own_weights else set()
        device.there |= {*self.weights, CACHE}

    async def within(self, seconds: float, method: Any, *args: Any) -> Any:
        if method is EngineLoop.collect:
            await asyncio.Event().wait()
        self.device.happens(method.__name__)
        if method is EngineLoop.sleep:
            # Their weights need not be kept: new ones come before they wake.
            assert args == (False,)
            self.device.there -= {WEIGHTS, CACHE}
        elif method is EngineLoop.wake_weights:
            self.device.there |= self.weights
        elif method is EngineLoop.wake:
            self.device.there |= {*self.weights, CACHE}

    def kill(self) -> None: ...


class Run:
    """A trainer whose parts tell the device what they do."""

    def __init__(self, *, sleeps: bool = True, own_weights: bool = True) -> None:
        self.device = device = Device()
        self.learner = Learner(device)
        self.turns = SharedDevices(
            SimpleNamespace(replacing=0, engines=[Engine(device, own_weights=own_weights)]),
            self.learner,
            EnginesTurn(),
            Waits(),
            seconds=60,
            engines_sleep=sleeps,
            actor_stays=not own_weights,
        )
        publication: Any = publication_of(
            job().spec,
            Engines(None, self, self.turns),  # type: ignore[arg-type]
            Waits(),
            self if own_weights else None,  # type: ignore[arg-type]
        )
        self.trainer = PipelineTrainer(self, publication, self.turns)  # type: ignore[arg-type]

    # As a training step, the publication under all others, and the canaries.

    async def run(self, groups: Sequence[Group], *, number: int, version: int) -> TrainedBatch:
        self.device.happens("update")
        return TrainedBatch()

    def forget(self) -> None:
        pass

    async def publish(self, version: int) -> dict[str, float]:
        self.device.happens("publish")
        return {}

    async def ask(self) -> None:
        await self.learner.ask()

    async def check(self) -> dict[str, float]:
        self.device.happens("engines score canaries")
        return {}

    async def steps(self, count: int) -> list[tuple[str, set[str]]]:
        await self.turns.at_start()
        for step in range(1, count + 1):
            self.device.happens("sample")
            await self.trainer.train([], step=step, version=step - 1)
            await self.trainer.publish(step)
        self.device.happens("sample")
        return self.device.seen


def job(**spec: Any) -> ResolvedJob:
    spec = {"placement": "colocated", "trainer": {"gpusPerReplica": 1}} | spec
    spec["rollout"] = {"engine": "torch", "maxResponseTokens": 3} | spec.get("rollout", {})
    [read] = load_jobs(yaml.safe_dump(copy_job(**spec)))
    return resolve(read)


async def test_engines_with_weights_of_their_own_and_the_learner_are_there_in_turn() -> None:
    sampling, step = (
        ("sample", {WEIGHTS, CACHE}),
        [
            ("sleep", {WEIGHTS, CACHE}),
            ("update", LEARNER),
            ("wake_weights", {"actor"}),
            ("publish", {"actor", WEIGHTS}),
            ("the learner scores canaries", {"actor", WEIGHTS}),
            ("wake", {WEIGHTS}),
            ("engines score canaries", {WEIGHTS, CACHE}),
        ],
    )
    assert await Run().steps(2) == [sampling, *step, sampling, *step, sampling]


async def test_an_engine_with_the_learner_s_weights_gives_its_cache_and_the_actor_stays() -> None:
    sampling, step = (
        ("sample", {"actor", CACHE}),
        [
            ("sleep", {"actor", CACHE}),
            ("update", LEARNER),
            ("wake_weights", {"actor"}),
            ("publish", {"actor"}),
            ("wake", {"actor"}),
        ],
    )
    assert await Run(own_weights=False).steps(2) == [sampling, *step, sampling, *step, sampling]


@pytest.mark.parametrize("own_weights", [True, False])
async def test_engines_that_keep_their_cache_never_sleep_and_the_learner_goes_all_the_same(own_weights: bool) -> None:
    engine = {WEIGHTS, CACHE} if own_weights else {CACHE}
    seen = await Run(sleeps=False, own_weights=own_weights).steps(2)
    assert not {"sleep", "wake_weights", "wake"} & {what for what, _ in seen}
    there = dict(seen)
    assert there["sample"] == (engine if own_weights else {*engine, "actor"})
    assert there["update"] == LEARNER | engine
    assert there["publish"] == {"actor", *engine}


@pytest.mark.parametrize(
    ("spec", "ranks", "expected"),
    [
        pytest.param({"rollout": {"engine": "vllm"}}, 1, (True, False), id="vllm"),
        pytest.param({"rollout": {"engine": "vllm", "freeCacheEngine": False}}, 1, (False, False), id="vllm stays"),
        pytest.param({"rollout": {"engine": "torch"}}, 1, (True, True), id="torch with shared weights"),
        pytest.param({"rollout": {"engine": "torch", "freeCacheEngine": False}}, 1, (False, True), id="torch stays"),
        pytest.param({"rollout": {"engine": "torch"}}, 2, (True, False), id="torch with weights of its own"),
        pytest.param({"trainer": {}}, 1, None, id="on the CPU nobody moves"),
        pytest.param(
            {"placement": "separate", "rollout": {"engine": "vllm", "gpusPerReplica": 1}},
            1,
            None,
            id="GPUs of their own",
        ),
    ],
)
async def test_which_engines_take_turns(
    spec: dict[str, Any],
    ranks: int,
    expected: tuple[bool, bool] | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """From the job: whether they sleep, and whether the actor stays. Before they start the learner makes room."""
    device = Device()
    learner = Learner(device, ranks)

    async def start(name: str, *_: Any, **__: Any) -> Engine:
        device.happens("start")
        return Engine(device)

    monkeypatch.setattr(engines_of_run.RayEngine, "start", start)
    monkeypatch.setattr(engines_of_run, "WeightPublication", lambda *_, **__: FakePublication())
    async with started(job(**spec), learner, tmp_path) as engines:
        turns: Any = engines.turns
        assert (None if turns is None else (turns._engines_sleep, turns._actor_stays)) == expected
    [(_, there)] = [moment for moment in device.seen if moment[0] in ("start", "start_engine")]
    assert there == (LEARNER if expected is None else {"actor"} if expected[1] else set())


class FakePublication:
    """Opens no connection."""

    between = resend = bring_up = admit_by = None


@asynccontextmanager
async def started(built: ResolvedJob, learner: Any, folder: Path) -> AsyncIterator[Engines]:
    model: Any = SimpleNamespace(path=folder, address=None, context_length=64)
    engines = await start_engines(built, model, learner, tuple, shelf=Shelf(folder), waits=Waits())
    try:
        yield engines
    finally:
        await engines.close()
