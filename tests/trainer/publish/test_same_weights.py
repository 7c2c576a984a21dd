"""Engines that hold other weights than the learner are told by name, mended, replaced; sound ones are left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rljob_trainer.errors import EngineError
from rljob_trainer.publish.same_weights import SameWeights
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.weights.manifest import manifest_of
from rljob_trainer.weights.residence import Resident, fingerprint, resident
from rljob_trainer.weights.shards import Shard

pytestmark = pytest.mark.integrity

Model = dict[str, torch.Tensor]


def model(version: int) -> Model:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(8, 8, generator=generator) for name in ("embedding", "layer", "head")}


class Engine:
    """Holds weights; ``resident`` is all that is asked of it."""

    place = None

    def __init__(self, name: str) -> None:
        self.name, self.weights, self.lost, self.fuses = name, model(1), False, False

    async def within(self, seconds: float, method: Any, in_any_order: bool = False) -> Any:
        assert method is EngineLoop.resident
        if self.lost:
            raise EngineError(f"engine {self.name} is gone")
        return self.fused() if self.fuses else resident(self.weights.items(), in_any_order=in_any_order)

    def fused(self) -> Resident:
        """In a layout that the learner has not."""
        return fingerprint([manifest_of([("runtime", torch.cat([*self.weights.values()]))])])


class Pool:
    def __init__(self, engines: list[Engine]) -> None:
        self.serving, self.version = engines, 1
        self.lost: dict[str, str] = {}
        self.held: list[str] = []

    async def hold(self, name: str) -> None:
        self.held.append(name)

    def activate(self, names: list[str]) -> None:
        self.held = [name for name in self.held if name not in names]

    def report_lost(self, name: str, reason: str) -> None:
        self.lost[name] = reason


class World:
    """Two engines, and a learner that is both rank and group."""

    rank = 0

    def __init__(self) -> None:
        self.engines = [Engine("0"), Engine("1")]
        self.pool, self.said, self.resent = Pool(self.engines), [], []  # type: ignore[var-annotated]
        self.trained, self.asked = model(1), 0
        self.sends: Callable[[Engine], None] = lambda engine: self.give(engine)
        self.weights = SameWeights(
            self,  # type: ignore[arg-type]
            self.pool,  # type: ignore[arg-type]
            self.resend,  # type: ignore[arg-type]
            seconds=5.0,
            report=self.said.append,
        )

    async def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.asked += 1
        return [function(self, *args)]

    def shards(self) -> Any:
        return (Shard(n, tuple(t.shape), (0,) * t.ndim, t) for n, t in self.trained.items())

    def give(self, engine: Engine) -> None:
        engine.weights = {name: tensor.clone() for name, tensor in self.trained.items()}

    async def resend(self, engine: Engine) -> None:
        self.resent.append(engine.name)
        self.sends(engine)

    async def publish(self, version: int, *but: str) -> None:
        """All engines get the new weights, but for some."""
        await self.weights.before()
        self.trained, self.pool.version = model(version), version
        for engine in self.engines:
            if engine.name not in but:
                self.give(engine)
        await self.weights.after(version)


@pytest.fixture
def world() -> World:
    made = World()
    asyncio.run(made.publish(1))
    return made


def quiet(world: World) -> bool:
    return not (world.said or world.resent or world.pool.lost or world.pool.held)


async def test_publications_that_arrive_are_no_news(world: World) -> None:
    for version in (2, 3, 4):
        await world.publish(version)
    assert quiet(world)


async def test_an_engine_that_stays_at_the_former_version_gets_the_new_one(world: World) -> None:
    await world.publish(2, "1")
    (said,) = world.said
    assert said.startswith("engine 1: after the publication of version 2, it still has the weights of version 1")
    assert (world.resent, world.pool.held, world.pool.lost) == (["1"], [], {})
    world.said.clear()
    world.resent.clear()
    await world.publish(3)
    assert quiet(world)


async def test_one_that_cannot_be_mended_is_replaced_and_named(world: World) -> None:
    world.sends = lambda engine: None
    await world.publish(2, "0")
    assert list(world.pool.lost) == ["0"]
    assert world.pool.lost["0"].endswith("the new ones were not loaded, even after its weights were sent again")


async def test_when_none_can_be_mended_the_sender_is_to_blame(world: World) -> None:
    def swapped(engine: Engine) -> None:
        world.give(engine)
        engine.weights["layer"] = engine.weights["layer"].flip(0)

    world.sends = swapped
    with pytest.raises(EngineError, match=r"layer has the same values in another order.*what the learner sends is not"):
        await world.publish(2, "0", "1")


async def test_memory_that_changes_between_publications_is_found_before_the_next(world: World) -> None:
    world.engines[0].weights["head"][3, 3] += 1
    await world.publish(2)
    assert world.pool.lost["0"].startswith("engine 0: head changed in its memory since version 1 was published")


async def test_who_joins_with_other_weights_does_not_serve(world: World) -> None:
    joins = Engine("2")
    assert await world.weights.admits(joins)  # type: ignore[arg-type]
    joins.weights = model(7)
    assert not await world.weights.admits(joins)  # type: ignore[arg-type]
    assert "engine 2: after the publication of version 1" in world.said[0]
    assert world.said[0].endswith("it does not serve")


async def test_the_learner_adds_nothing_up_for_engines_in_a_layout_of_their_own(world: World) -> None:
    for engine in world.engines:
        engine.fuses = True
    await world.publish(2)
    asked = world.asked
    await world.publish(3)
    assert world.asked == asked
    for engine in world.engines:  # others have taken their places
        engine.fuses = False
    await world.publish(4, "1")
    assert world.asked > asked
    assert world.resent == ["1"]


async def test_one_that_is_lost_meanwhile_is_the_pools_business(world: World) -> None:
    world.engines[1].lost = True
    await world.publish(2)
    assert world.pool.lost == {"1": "engine 1 is gone"}
    assert world.said == []


@pytest.fixture
def fused() -> World:
    """Three engines that can be compared with one another only."""
    made = World()
    made.engines.append(Engine("2"))
    for engine in made.engines:
        engine.fuses = True
    asyncio.run(made.publish(1))
    return made


async def test_replicas_of_a_layout_that_agree_are_no_news(fused: World) -> None:
    for version in (2, 3):
        await fused.publish(version)
    assert quiet(fused)


async def test_a_replica_that_differs_from_most_gets_its_weights_once_more(fused: World) -> None:
    await fused.publish(2, "0")
    (said,) = fused.said
    assert said.startswith("engine 0: after the publication of version 2, worker 0: runtime differ from the other")
    assert (fused.resent, fused.pool.held, fused.pool.lost) == (["0"], [], {})


async def test_a_replica_that_cannot_be_mended_is_replaced(fused: World) -> None:
    fused.sends = lambda engine: None
    await fused.publish(2, "1")
    assert list(fused.pool.lost) == ["1"]
    assert "even after its weights were sent again" in fused.pool.lost["1"]


async def test_where_two_replicas_differ_both_get_their_weights_once_more(fused: World) -> None:
    del fused.engines[2]
    await fused.publish(2, "0")
    assert (sorted(fused.resent), fused.pool.held, fused.pool.lost) == (["0", "1"], [], {})


async def test_runtime_memory_that_changes_between_publications_is_found(fused: World) -> None:
    fused.engines[1].weights["layer"][0, 0] += 1
    await fused.publish(2)
    assert fused.pool.lost["1"].startswith("engine 1: worker 0: runtime changed in its memory since version 1")


async def test_a_replica_that_joins_with_other_weights_does_not_serve(fused: World) -> None:
    joins = Engine("3")
    joins.fuses = True
    assert await fused.weights.admits(joins)  # type: ignore[arg-type]
    joins.weights = model(7)
    assert not await fused.weights.admits(joins)  # type: ignore[arg-type]
    (said,) = fused.said
    assert said == "engine 3: with version 1, worker 0: runtime differ from the other engines: it does not serve"
