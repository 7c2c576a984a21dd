"""The mismatch guard against real engines with wrong weights: found, mended, or replaced."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rljob_trainer.errors import EngineError
from rljob_trainer.learner.protocol import ScoreRequest, ScoreResult, SequenceBatch
from rljob_trainer.publish.canaries import Canaries, GuardedPublication
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.torch_engine import TorchEngine
from rljob_trainer.waits import Waits

pytestmark = pytest.mark.integrity

PROMPTS = ((1, 2, 3, 4, 5), (6, 7), (8,))


class Handle:
    """An engine in this process."""

    place = None

    def __init__(self, name: str, engine: TorchEngine) -> None:
        self.name, self.engine = name, engine
        self.loop = EngineLoop(lambda: engine, name)

    async def within(self, seconds: float, method: Any, *args: Any) -> Any:
        return await asyncio.to_thread(method, self.loop, *args)

    def kill(self) -> None: ...


class Pool:
    def __init__(self, engines: list[Handle]) -> None:
        self.serving: list[Handle] = engines
        self.held: list[str] = []
        self.lost: dict[str, str] = {}

    async def hold(self, name: str) -> None:
        self.held.append(name)

    def activate(self, names: list[str]) -> None:
        self.held = [name for name in self.held if name not in names]

    def report_lost(self, name: str, reason: str) -> None:
        self.lost[name] = reason


class Learner:
    """Scores with the right weights."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine

    async def score(self, batch: SequenceBatch, request: ScoreRequest) -> ScoreResult:
        ends = np.cumsum(batch.prompt_lengths + batch.response_lengths)
        rows = np.split(batch.token_ids, ends[:-1])
        pairs = [(r[:p].tolist(), r[p:].tolist()) for r, p in zip(rows, batch.prompt_lengths, strict=True)]
        return ScoreResult(log_probs=np.concatenate(self.engine.score(pairs, request.temperature)))


class World:
    """Three engines, and a learner whose weights are those of the folder."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.right = TorchEngine.from_folder(folder)
        self.engines = [Handle(str(i), TorchEngine.from_folder(folder)) for i in range(3)]
        self.pool = Pool(self.engines)
        self.said: list[str] = []
        self.resent: list[str] = []
        self.resending_helps = True
        self.canaries = Canaries(
            Learner(self.right),  # type: ignore[arg-type]
            self.pool,  # type: ignore[arg-type]
            self.resend,  # type: ignore[arg-type]
            PROMPTS,
            **{"tolerance": 0.05, "seconds": 10.0, "report": self.said.append} | options,
        )

    async def resend(self, engine: Handle) -> None:
        self.resent.append(engine.name)
        if self.resending_helps:
            for name, tensor in self.right.parameters.items():
                engine.engine.parameters[name].copy_(tensor)

    def give_to_the_trainer(self, number: int) -> None:
        for name, tensor in self.engines[number].engine.parameters.items():
            self.right.parameters[name].copy_(tensor)

    def spoil(self, number: int, by: float = 2.0) -> None:
        with torch.no_grad():
            self.engines[number].engine.parameters["model.layers.0.mlp.down_proj.weight"].add_(by)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("canaries")
    torch.manual_seed(0)
    shape = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, max_position_embeddings=64))
    model.save_pretrained(path)
    return path


@pytest.fixture
def world(folder: Path) -> World:
    return World(folder)


async def test_engines_that_agree_are_left_alone(world: World) -> None:
    metrics = await world.canaries.check()
    assert metrics["mismatch/canary/max"] < 1e-5
    assert metrics["mismatch/canary/reloaded"] == 0
    assert (world.said, world.resent, world.pool.lost) == ([], [], {})


async def test_an_engine_with_other_weights_gets_them_once_more(world: World) -> None:
    world.spoil(1)
    metrics = await world.canaries.check()
    assert metrics["mismatch/canary/max"] > 0.05
    assert metrics["mismatch/canary/reloaded"] == 1
    assert world.resent == ["1"]
    assert world.pool.held == []
    assert "engine 1 deviates from the trainer" in world.said[0]
    assert (await world.canaries.check())["mismatch/canary/max"] < 1e-5


async def test_one_that_stays_wrong_is_replaced(world: World) -> None:
    world.spoil(2, float("nan"))
    world.resending_helps = False
    metrics = await world.canaries.check()
    assert metrics["mismatch/canary/max"] == float("inf")
    assert list(world.pool.lost) == ["2"]
    assert world.pool.held == ["2"]  # it never served again


async def test_one_that_dies_while_it_is_mended_does_not_end_the_run(world: World) -> None:
    async def fails(engine: Handle) -> None:
        raise EngineError("no engine is left to take version 3")

    world.spoil(1)
    world.canaries._resend = fails  # type: ignore[assignment]
    assert (await world.canaries.check())["mismatch/canary/reloaded"] == 1
    assert "no engine is left" in world.pool.lost["1"]


async def test_one_that_is_lost_says_nothing_of_the_others(world: World) -> None:
    """With the lost one among those that agree, the other would be the exception, and be replaced again and again."""
    world.pool.serving = world.engines[:2]
    await world.canaries.check()
    world.engines[0].loop.close()
    world.spoil(1)
    world.resending_helps = False
    with pytest.raises(EngineError, match="although they agreed before"):
        await world.canaries.check()
    assert list(world.pool.lost) == ["0"]


async def test_one_that_is_lost_after_a_second_sending_does_not_serve_again(world: World) -> None:
    async def ends(engine: Handle) -> None:
        engine.loop.close()

    world.spoil(1)
    world.canaries._resend = ends  # type: ignore[assignment]
    await world.canaries.check()
    assert (list(world.pool.lost), world.pool.held) == (["1"], ["1"])
    assert "has been closed" in world.pool.lost["1"]


async def test_one_that_joins_serves_if_it_agrees(world: World) -> None:
    late = Handle("late", TorchEngine.from_folder(world.folder))
    with torch.no_grad():
        late.engine.parameters["model.layers.0.mlp.down_proj.weight"].add_(2.0)
    # Nothing is known yet that it could be held against.
    assert await world.canaries.admits(late)  # type: ignore[arg-type]
    await world.canaries.check()
    assert not await world.canaries.admits(late)  # type: ignore[arg-type]
    assert "engine late joins, but deviates from the trainer by" in world.said[0]
    await world.resend(late)
    assert await world.canaries.admits(late)  # type: ignore[arg-type]
    assert world.pool.lost == {}


async def test_one_that_joins_is_not_held_against_older_weights(world: World) -> None:
    await world.canaries.check()
    for number in range(3):
        world.spoil(number)
    # As after a publication: the trainer has those weights too.
    world.give_to_the_trainer(2)
    late = world.engines[2]
    score = world.canaries._learner.score

    async def joins_meanwhile(batch: SequenceBatch, request: ScoreRequest) -> ScoreResult:
        assert await world.canaries.admits(late)  # type: ignore[arg-type]
        return await score(batch, request)

    world.canaries._learner.score = joins_meanwhile  # type: ignore[method-assign]
    await world.canaries.check()
    assert (world.resent, world.said) == ([], [])


async def test_what_all_engines_share_is_said_now_and_again_and_nobody_is_thrown_out(world: World) -> None:
    for number in range(3):
        world.spoil(number)
    for _ in range(150):
        await world.canaries.check()
    assert (world.resent, world.pool.lost) == ([], {})
    assert len(world.said) == 2
    assert "every engine deviates" in world.said[0]


@pytest.mark.parametrize("count", [1, 3])
async def test_when_all_stop_agreeing_the_run_ends(world: World, count: int) -> None:
    """As when an engine keeps its first weights, whatever it is sent."""
    world.pool.serving = world.engines[:count]
    await world.canaries.check()
    for number in range(count):
        world.spoil(number)
    world.resending_helps = False
    with pytest.raises(
        EngineError, match=r"although they agreed before.*weights.canaryTolerance \(0.05\) in a new job .* --resume"
    ):
        await world.canaries.check()
    assert world.resent == [str(number) for number in range(count)]
    assert world.pool.lost == {}


async def test_when_all_stop_agreeing_and_a_second_sending_helps_it_goes_on(world: World) -> None:
    await world.canaries.check()
    for number in range(3):
        world.spoil(number)
    metrics = await world.canaries.check()
    assert metrics["mismatch/canary/reloaded"] == 3
    assert (world.pool.lost, world.pool.held) == ({}, [])
    assert (await world.canaries.check())["mismatch/canary/max"] < 1e-5


async def test_a_sole_engine_that_never_agreed_is_told_of_and_goes_on(world: World) -> None:
    world.pool.serving = world.engines[:1]
    world.spoil(0)
    world.resending_helps = False
    for _ in range(3):
        await world.canaries.check()
    assert sum("every engine deviates" in said for said in world.said) == 1
    assert (world.pool.lost, world.pool.held) == ({}, [])


async def test_a_publication_ends_with_the_canaries(world: World) -> None:
    class Publication:
        async def publish(self, version: int) -> dict[str, float]:
            return {"published": float(version)}

    metrics = await GuardedPublication(Publication(), world.canaries).publish(7)
    assert metrics["published"] == 7
    assert "mismatch/canary/max" in metrics


async def test_one_that_joins_at_the_end_of_a_publication_is_not_held_against_the_former_weights(world: World) -> None:
    await world.canaries.check()

    class Publication:
        async def publish(self, version: int) -> dict[str, float]:
            for number in range(3):
                world.spoil(number)
            world.give_to_the_trainer(2)
            assert await world.canaries.admits(world.engines[2])  # type: ignore[arg-type]
            return {}

    await GuardedPublication(Publication(), world.canaries).publish(7)
    assert (world.resent, world.said) == ([], [])


async def test_the_trainer_is_known_to_wait_for_the_learner_and_then_for_each_engine(folder: Path) -> None:
    waits, said = Waits(lambda: 0.0), []

    def note() -> None:
        assert waits.latest is not None
        said.append((waits.latest.sentence, waits.left(waits.latest)))

    world = World(folder, waits=waits)
    score = world.right.score
    world.right.score = lambda *given: (note(), score(*given))[1]  # type: ignore[assignment,func-returns-value]
    for handle in world.engines:
        own = handle.engine.score
        handle.engine.score = lambda *given, own=own: (note(), own(*given))[1]  # type: ignore[assignment,misc]
    await world.canaries.check()
    # Engines score at the same time: of those that have not answered, the last that was asked is told.
    of_engines = {(f"trainer waits for engine {number} to score the canaries", 10.0) for number in range(3)}
    assert said[0] == ("trainer waits for the learner to score the canaries", 10.0)
    assert len(said) == 4
    assert set(said[1:]) <= of_engines
    assert waits.latest is None
