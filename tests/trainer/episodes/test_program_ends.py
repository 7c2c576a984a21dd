"""How a program ends: what it may return, what it is told when it may not go on, what is said when it goes wrong."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from two_turns import PROMPT, SAMPLING, Played, programs, tasks

from conftest import tiny
from rljob_trainer.episodes.curfew import EpisodeOverError
from rljob_trainer.episodes.environment import Task, tasks_of
from rljob_trainer.episodes.identity import validation_of
from rljob_trainer.episodes.log import EpisodeLog
from rljob_trainer.episodes.play import Voice
from rljob_trainer.episodes.programs import Siblings
from rljob_trainer.errors import ProgramError, WorldFailedError
from rljob_trainer.rollout.torch_engine import TorchEngine
from rljob_trainer.world.protocol import World, WorldError


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


@pytest.mark.parametrize("returned", ["good", "1.0", b"1", {"prediction": "7"}, [1.0], lambda: 1.0, {"score": "1"}])
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

    with pytest.raises(ProgramError, match="was told 100 times that the episode is over and asks again"):
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
    assert environment.waiting_for() == "1 call of the environment, oldest (search) for 0 s"
    answer.set()
    await playing
    assert environment.waiting_for() == ""


async def test_a_program_that_neither_asks_nor_calls_is_named_and_its_siblings_count(
    engine: TorchEngine, log: EpisodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests of an episode are no two episodes."""
    monkeypatch.setattr("rljob_trainer.episodes.programs._AT_ITS_OWN_SECONDS", 0.0)
    asleep, awake = asyncio.Event(), asyncio.Event()

    async def sleeps(task: Task, model: Voice, world: World) -> None:
        first = await model.ask(task.prompt.token_ids)
        await model.ask(first.context)
        if task.id.sample == 2:
            asleep.set()
            await awake.wait()

    environment = programs(sleeps, log)
    playing = asyncio.create_task(environment.play(tasks(3), Played(engine)))
    await asleep.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    assert environment.progress() == [2]
    assert environment.waiting_for() == "1 program makes no calls, longest sample 2 of prompt 5 for 0 s"
    awake.set()
    await playing
    assert environment.progress() == []


@pytest.mark.parametrize("swallowed", [asyncio.CancelledError, BaseException])
async def test_a_program_that_cannot_be_cancelled_does_not_hide_its_sibling_s_error(
    engine: TorchEngine, log: EpisodeLog, monkeypatch: pytest.MonkeyPatch, swallowed: type[BaseException]
) -> None:
    monkeypatch.setattr("rljob_trainer.episodes.programs._DEAF_SECONDS", 0.02)
    before = asyncio.all_tasks()

    async def deaf(task: Task, model: Voice, world: World) -> None:
        await model.ask(task.prompt.token_ids)
        if task.id.sample == 1:
            raise KeyError("column")
        for _ in range(3):  # one cancellation, one end of its coroutine, and another one by the garbage collector
            with suppress(swallowed):
                await asyncio.Event().wait()

    with pytest.raises(ProgramError, match=r"sample 1 of prompt 5: .*deaf raised KeyError: 'column'"):
        await asyncio.wait_for(programs(deaf, log).play(tasks(2), Played(engine)), 10)
    assert asyncio.all_tasks() - before == set()


async def test_siblings_get_messages_of_their_own(engine: TorchEngine) -> None:
    prompt = replace(PROMPT, messages=({"role": "user", "content": "question"},))
    one, other = (replace(task, prompt=prompt) for task in tasks(2))
    one.messages[0]["content"] += " changed"
    assert (other.messages, one.messages) == ([{"role": "user", "content": "question"}],) * 2


def raising(error: BaseException) -> Any:
    async def program(task: Task, model: Voice, world: World) -> None:
        await model.ask(task.prompt.token_ids)
        if task.id.sample == 1:
            raise error

    return program


class NoException(BaseException):
    """As some libraries use to pass by what others catch."""


@pytest.mark.parametrize(
    "error",
    [
        asyncio.CancelledError(),
        SystemExit(0),
        KeyboardInterrupt(),
        StopIteration(),
        GeneratorExit(),
        NoException(),
    ],
    ids=repr,
)
async def test_no_exception_of_a_program_s_own_passes_for_somebody_else_s(
    engine: TorchEngine, log: EpisodeLog, error: BaseException
) -> None:
    """``CancelledError`` would be taken for a wish of the pipeline's, ``SystemExit`` would end the driver with 0."""
    with pytest.raises(ProgramError, match=r"sample 1 of prompt 5: .*program raised "):
        await programs(raising(error), log).play(tasks(3), Played(engine))


async def test_an_episode_that_is_closed_from_outside_of_its_task_ends_without_a_word(
    engine: TorchEngine, log: EpisodeLog
) -> None:
    """As the interpreter does at its end with what nobody will resume."""

    async def waits(task: Task, model: Voice, world: World) -> None:
        await asyncio.sleep(0)

    (task,) = tasks_of(PROMPT, range(1), SAMPLING, seed=1, purpose=validation_of("held-out"))
    played = programs(waits, log)._begun(task, Siblings(Played(engine)))

    async def begin() -> None:
        played.send(None)

    await asyncio.create_task(begin())
    played.close()


async def test_an_episode_that_is_cancelled_ends_without_a_word(engine: TorchEngine, log: EpisodeLog) -> None:
    asked = asyncio.Event()

    async def waits(task: Task, model: Voice, world: World) -> None:
        asked.set()
        await asyncio.Event().wait()

    playing = asyncio.create_task(programs(waits, log).play(tasks(1), Played(engine)))
    await asked.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


@pytest.mark.parametrize("grouped", [True, False])
async def test_branches_beyond_the_last_turn_end_the_episode_with_those_before_it(
    engine: TorchEngine, log: EpisodeLog, grouped: bool
) -> None:
    """A group of tasks raises ``EpisodeOverError`` inside of a group, ``gather`` lets the others run on."""

    async def wide(task: Task, model: Voice, world: World) -> float:
        first = await model.ask(task.prompt.token_ids)
        branches = [model.branch(str(number)) for number in range(60)]
        asked = [branch.ask([*first.context, number]) for number, branch in enumerate(branches)]
        if not grouped:
            await asyncio.gather(*asked)
        async with asyncio.TaskGroup() as group:
            for coroutine in asked:
                group.create_task(coroutine)
        return 1.0

    (episode,) = await programs(wide, log).play(tasks(1), Played(engine))
    assert (episode.finish, episode.returned) == ("length", None)
    assert len(episode.leaves) == (1 if grouped else 49), "a group cancels its tasks, gather does not"


async def test_what_a_program_leaves_behind_changes_no_episode(engine: TorchEngine, log: EpisodeLog) -> None:
    left: list[asyncio.Task[Any]] = []
    world_asked, ended = asyncio.Event(), asyncio.Event()

    async def leaves(task: Task, model: Voice, world: World) -> float:
        async def hang() -> None:
            world_asked.set()
            await asyncio.Event().wait()

        async def beside() -> None:
            answer = await model.branch("beside").ask([*task.prompt.token_ids, 1])
            await ended.wait()
            await model.branch("beside").ask(answer.context)

        await model.ask(task.prompt.token_ids)
        left.append(asyncio.create_task(world.branch("b").call("hang", hang)))
        await world_asked.wait()
        left.append(asyncio.create_task(beside()))
        await asyncio.sleep(0)
        return 1.0

    environment = programs(leaves, log)
    (episode,) = await environment.play(tasks(1), Played(engine))
    assert [len(leaf.tokens) for leaf in episode.leaves] == [6, 6], "what was asked is answered"
    ended.set()
    calling, asking = await asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), 5)
    assert (type(calling), type(asking)) == (asyncio.CancelledError, EpisodeOverError)
    assert [len(leaf.tokens) for leaf in episode.leaves] == [6, 6]
    assert environment.waiting_for() == ""


async def test_a_branch_that_is_named_again_goes_on_where_it_was(engine: TorchEngine, log: EpisodeLog) -> None:
    async def again(task: Task, model: Voice, world: World) -> float:
        said = [(await model.branch("judge").ask(task.prompt.token_ids)).said for _ in range(3)]
        return float(len(set(said)))

    async def at_once(task: Task, model: Voice, world: World) -> float:
        said = [model.branch("judge").ask(task.prompt.token_ids) for _ in range(3)]
        return float(len({answer.said for answer in await asyncio.gather(*said)}))

    for program in (again, at_once):
        (episode,) = await programs(program, log).play(tasks(1), Played(engine))
        assert (episode.returned, len(episode.leaves)) == (3.0, 3)
        (repeated,) = await programs(program, log).play(tasks(1), Played(engine))
        assert repeated.response_ids == episode.response_ids
        log.over(episode.id)


async def test_a_branch_s_chance_does_not_depend_on_which_is_faster(engine: TorchEngine, log: EpisodeLog) -> None:
    def program(order: str) -> Any:
        async def two(task: Task, model: Voice, world: World) -> None:
            for name in order:
                await model.branch(name).ask([*task.prompt.token_ids, ord(name) % 10])

        return two

    said = []
    for order in ("ab", "ba"):
        (episode,) = await programs(program(order), log).play(tasks(1), Played(engine))
        said.append({leaf.prompt_ids: leaf.tokens.ids.tolist() for leaf in episode.leaves})
        log.over(episode.id)
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("context", "most", "said"),
    [
        ([], None, "ValueError: the context for the model is empty"),
        ([1.5], None, "TypeError: 'float' object cannot be interpreted as an integer"),
        (["1"], None, "TypeError: 'str' object"),
        ([1, 10**7], None, "ValueError: the context has token id 10000000, but the model has 1000000 tokens"),
        ([1, -1], None, "ValueError: the context has token id -1,"),
        ([1], 0, "ValueError: max_tokens is 0"),
        ([1], -3, "ValueError: max_tokens is -3"),
        ([1], 1.5, "TypeError: 'float' object"),
    ],
)
async def test_what_cannot_be_asked_is_said(
    engine: TorchEngine, log: EpisodeLog, context: Any, most: Any, said: str
) -> None:
    async def asks(task: Task, model: Voice, world: World) -> None:
        await model.ask(context, max_tokens=most)

    with pytest.raises(ProgramError, match=said):
        await programs(asks, log).play(tasks(1), Played(engine))


async def test_a_failure_of_the_world_in_a_group_of_tasks_is_one_too(
    engine: TorchEngine, log: EpisodeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rljob_trainer.episodes.play._PAUSE_SECONDS", 0.001)

    async def down() -> None:
        raise WorldError("down")

    async def shards() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(down())

    async def search(task: Task, model: Voice, world: World) -> None:
        await model.ask(task.prompt.token_ids)
        await world.call("search", shards)

    with pytest.raises(WorldFailedError, match=r"search .* failed 4 times, the last time with: down"):
        await programs(search, log).play(tasks(1), Played(engine))
