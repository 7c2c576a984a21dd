"""Episodes that are ended because their group is to be trained now, in every state that a program can be in."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from two_turns import PROMPT, Played, programs, tasks

from conftest import tiny
from rljob_trainer.episodes import curfew
from rljob_trainer.episodes.curfew import EpisodeOverError
from rljob_trainer.episodes.environment import Task
from rljob_trainer.episodes.episode import Episode
from rljob_trainer.episodes.log import EpisodeLog
from rljob_trainer.episodes.play import Voice
from rljob_trainer.errors import ProgramError
from rljob_trainer.rollout.torch_engine import TorchEngine
from rljob_trainer.world.protocol import World


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


@pytest.fixture
def engine(model: Any) -> TorchEngine:
    return TorchEngine.from_model(model, version=3)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EpisodeLog]:
    opened = EpisodeLog(tmp_path / "episodes")
    yield opened
    opened.close()


class Place:
    """Where a program waits, until somebody lets it go on."""

    def __init__(self) -> None:
        self.there = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self) -> str:
        self.there.set()
        await self.go_on.wait()
        return "told"


async def ended(program: Any, log: EpisodeLog, engine: TorchEngine, place: Place, samples: int = 1) -> list[Episode]:
    """The episodes of a program that is told that it is over when it has come to its place."""
    environment = programs(program, log)
    playing = asyncio.create_task(environment.play(tasks(samples), Played(engine)))
    await place.there.wait()
    assert environment.end(PROMPT.ordinal)
    return await playing


async def test_a_call_under_way_is_interrupted_and_the_episode_keeps_what_was_said(
    engine: TorchEngine, log: EpisodeLog
) -> None:
    place, raised = Place(), []

    async def calls(task: Task, model: Voice, world: World) -> float:
        first = await model.ask(task.prompt.token_ids)
        try:
            await world.call("place", place)
        except EpisodeOverError as error:
            raised.append((str(error), first.said))
            raise
        raise AssertionError

    (episode,) = await ended(calls, log, engine, place)
    assert raised == [("the episode's group must be trained now", tuple(episode.response_ids))]
    assert (episode.finish, episode.returned) == ("deadline", None)
    assert len(episode.response_ids) == 6  # a turn's tokens in these tests


async def test_a_program_may_return_what_it_has(engine: TorchEngine, log: EpisodeLog) -> None:
    """It may neither ask nor call any more, but has a moment."""
    place, refused = Place(), []

    async def cares(task: Task, model: Voice, world: World) -> float:
        first = await model.ask(task.prompt.token_ids)
        try:
            await world.call("place", place)
        except EpisodeOverError:
            for again in (model.ask(first.context), world.call("place", place)):
                try:
                    await again
                except EpisodeOverError:
                    refused.append(True)
        await asyncio.sleep(0.01)
        return 0.25

    (episode,) = await ended(cares, log, engine, place)
    assert (episode.finish, episode.returned, refused) == ("deadline", 0.25, [True, True])


async def test_a_program_that_waits_for_its_own_things_has_a_moment_and_no_more(
    engine: TorchEngine, log: EpisodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curfew, "_PARTING_SECONDS", 0.01)
    place = Place()

    async def waits(task: Task, model: Voice, world: World) -> float:
        await model.ask(task.prompt.token_ids)
        await place()
        raise AssertionError

    (episode,) = await ended(waits, log, engine, place)
    assert (episode.finish, episode.returned) == ("deadline", None)


async def test_calls_in_branches_are_all_interrupted(engine: TorchEngine, log: EpisodeLog) -> None:
    place, interrupted = Place(), []

    async def fans_out(task: Task, model: Voice, world: World) -> float:
        await model.ask(task.prompt.token_ids)

        async def one(name: str) -> None:
            try:
                await world.branch(name).call("place", place)
            except EpisodeOverError:
                interrupted.append(name)
                raise

        await asyncio.gather(one("left"), one("right"))
        raise AssertionError

    (episode,) = await ended(fans_out, log, engine, place)
    assert episode.finish == "deadline"
    assert sorted(interrupted) == ["left", "right"]


async def test_a_call_that_will_not_be_interrupted_returns(engine: TorchEngine, log: EpisodeLog) -> None:
    """And the task that made it is not left half cancelled: the program still has its moment."""
    place, came = Place(), []

    async def stubborn() -> str:
        try:
            return await place()
        except asyncio.CancelledError:
            return "all the same"

    async def calls(task: Task, model: Voice, world: World) -> float:
        await model.ask(task.prompt.token_ids)
        came.append(await world.call("place", stubborn))
        async with asyncio.timeout(10):
            await asyncio.sleep(0)
        running = asyncio.current_task()
        assert running is not None
        came.append(running.cancelling())
        return 0.5

    (episode,) = await ended(calls, log, engine, place)
    assert came == ["all the same", 0]
    assert (episode.finish, episode.returned) == ("length", 0.5)  # it came to its own end


async def test_a_group_with_nothing_to_train_on_is_not_ended(engine: TorchEngine, log: EpisodeLog) -> None:
    place = Place()

    async def calls_first(task: Task, model: Voice, world: World) -> float:
        await world.call("place", place)
        await model.ask(task.prompt.token_ids)
        return 1.0

    environment = programs(calls_first, log)
    playing = asyncio.create_task(environment.play(tasks(2), Played(engine)))
    await place.there.wait()
    assert not environment.end(PROMPT.ordinal)
    place.go_on.set()
    assert [(episode.finish, episode.returned) for episode in await playing] == [("length", 1.0)] * 2
    assert environment.end(PROMPT.ordinal)  # nobody plays it any more


async def test_siblings_that_have_ended_stay_as_they_are(engine: TorchEngine, log: EpisodeLog) -> None:
    place = Place()

    async def some_wait(task: Task, model: Voice, world: World) -> float:
        await model.ask(task.prompt.token_ids)
        if task.id.sample:
            await world.call("place", place)
        return 1.0

    episodes = await ended(some_wait, log, engine, place, samples=3)
    assert [(episode.finish, episode.returned) for episode in episodes] == [
        ("length", 1.0),
        ("deadline", None),
        ("deadline", None),
    ]


async def test_who_goes_on_asking_is_named(engine: TorchEngine, log: EpisodeLog) -> None:
    place = Place()

    async def deaf(task: Task, model: Voice, world: World) -> float:
        await model.ask(task.prompt.token_ids)
        while True:
            with suppress(EpisodeOverError):
                await world.call("place", place)

    with pytest.raises(ProgramError, match="was told 100 times that the episode is over and asks again"):
        await ended(deaf, log, engine, place)


async def test_a_stop_of_the_run_is_no_end_of_an_episode(engine: TorchEngine, log: EpisodeLog) -> None:
    """Cancelled from outside while it is over: that is a cancellation."""
    place = Place()

    async def calls(task: Task, model: Voice, world: World) -> float:
        await model.ask(task.prompt.token_ids)
        await place()
        raise AssertionError

    environment = programs(calls, log)
    playing = asyncio.create_task(environment.play(tasks(1), Played(engine)))
    await place.there.wait()
    environment.end(PROMPT.ordinal)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


async def test_an_ended_episode_that_is_played_again_goes_on_where_it_was(engine: TorchEngine, tmp_path: Path) -> None:
    """The process dies before the group is trained; the next one has a new deadline for it, and asks for nothing that
    is on record."""
    place, asked = Place(), []

    async def calls(task: Task, model: Voice, world: World) -> float:
        first = await model.ask(task.prompt.token_ids)
        await world.call("count", count)
        await world.call("place", place)
        await model.ask([*first.context, 5])
        return 1.0

    async def count() -> int:
        asked.append(1)
        return 1

    log = EpisodeLog(tmp_path / "episodes")
    (before,) = await ended(calls, log, engine, place)
    log.close()
    again = EpisodeLog(tmp_path / "episodes")
    place.go_on.set()
    again.restore([], PROMPT.ordinal, step=0, version=3, published_as=3)
    (after,) = await programs(calls, again).play(tasks(1), Played(engine))
    again.close()
    assert asked == [1]
    assert after.response_ids[:6] == before.response_ids
    assert (after.finish, after.returned, len(after.response_ids)) == ("length", 1.0, 13)
