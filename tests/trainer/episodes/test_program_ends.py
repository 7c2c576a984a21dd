"""How a program ends: what it may return, what it is told when it may not go on, what is said when it goes wrong."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from two_turns import Played, programs, tasks

from conftest import tiny
from rljob_trainer.episodes.environment import Task
from rljob_trainer.episodes.log import EpisodeLog
from rljob_trainer.episodes.play import EpisodeOverError, Voice
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


@pytest.mark.parametrize(
    ("returned", "kept"),
    [
        (None, None),
        (1, 1.0),
        (np.float32(0.5), 0.5),
        ({"score": True, "prediction": 7, "other": 1}, {"score": 1.0, "prediction": "7"}),
        ({"score": 0, "correct": 1, "prediction": None}, {"score": 0.0, "correct": True}),
    ],
)
async def test_what_a_program_returns_is_plain_data(
    engine: TorchEngine, log: EpisodeLog, returned: Any, kept: Any
) -> None:
    async def once(task: Task, model: Voice, world: World) -> Any:
        await model.ask(task.prompt.token_ids)
        return returned

    (episode,) = await programs(once, log).play(tasks(1), Played(engine))
    assert episode.returned == kept


@pytest.mark.parametrize("returned", ["good", {"prediction": "7"}, [1.0], lambda: 1.0, {"score": "high"}])
async def test_what_is_no_reward_is_named(engine: TorchEngine, log: EpisodeLog, returned: Any) -> None:
    async def once(task: Task, model: Voice, world: World) -> Any:
        await model.ask(task.prompt.token_ids)
        return returned

    with pytest.raises(ProgramError, match=r"sample 0 of prompt 5: the environment's program returned .*, which is no"):
        await programs(once, log).play(tasks(1), Played(engine))


async def test_a_program_that_goes_on_asking_is_named(engine: TorchEngine, log: EpisodeLog) -> None:
    async def deaf(task: Task, model: Voice, world: World) -> None:
        context = task.prompt.token_ids
        while True:
            with suppress(EpisodeOverError):
                context = (await model.ask(context)).context

    with pytest.raises(ProgramError, match="goes on asking after EpisodeOverError"):
        await programs(deaf, log).play(tasks(1), Played(engine))


async def test_what_a_program_raises_names_the_sample_and_the_line(engine: TorchEngine, log: EpisodeLog) -> None:
    async def wrong(task: Task, model: Voice, world: World) -> None:
        await model.ask(task.prompt.token_ids)
        raise KeyError("column")

    with pytest.raises(ProgramError, match=r"sample 0 of prompt 5: .*wrong raised KeyError: 'column' \(.*, line \d+\)"):
        await programs(wrong, log).play(tasks(1), Played(engine))


async def test_a_first_context_without_room_says_what_to_raise(engine: TorchEngine, log: EpisodeLog) -> None:
    async def long(task: Task, model: Voice, world: World) -> None:
        await model.ask([1] * 200)

    with pytest.raises(ProgramError, match=r"has 200 tokens, which leaves no room .* raise spec\.data\.maxPromptT"):
        await programs(long, log).play(tasks(1), Played(engine))


async def test_branches_ask_at_once_and_keep_their_own_order(engine: TorchEngine, log: EpisodeLog) -> None:
    async def wide(task: Task, model: Voice, world: World) -> float:
        async def one(name: str) -> int:
            answer = await model.branch(name).ask([*task.prompt.token_ids, len(name)])
            return len(answer.said)

        return float(sum(await asyncio.gather(one("a"), one("bc"))))

    (episode,) = await programs(wide, log).play(tasks(1), Played(engine))
    assert len(episode.leaves) == 2
    assert episode.returned == episode.response_tokens


async def test_what_an_episode_waits_for_outside_of_the_model_is_said(engine: TorchEngine, log: EpisodeLog) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def search() -> int:
        asked.set()
        await answer.wait()
        return 1

    async def slow(task: Task, model: Voice, world: World) -> None:
        await model.ask(task.prompt.token_ids)
        await world.call("search", search)

    environment = programs(slow, log)
    assert environment.waiting_for() == ""
    playing = asyncio.create_task(environment.play(tasks(1), Played(engine)))
    await asked.wait()
    assert environment.waiting_for() == "1 call of the environment, the oldest (search) for 0 s"
    answer.set()
    await playing
    assert environment.waiting_for() == ""
