"""A program may say what each answer has earned; it stands by the answer then, wherever in its leaves that is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from two_turns import PROMPT, Played, programs, tasks

from conftest import tiny
from rljob_trainer.episodes.environment import Task
from rljob_trainer.episodes.episode import Episode, Group, RewardResult
from rljob_trainer.episodes.log import EpisodeLog
from rljob_trainer.episodes.play import Voice
from rljob_trainer.errors import ProgramError
from rljob_trainer.rollout.torch_engine import TorchEngine
from rljob_trainer.validation.validator import sample_rows
from rljob_trainer.world.protocol import World


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine.from_model(tiny("llama"), version=3)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EpisodeLog]:
    opened = EpisodeLog(tmp_path / "episodes")
    yield opened
    opened.close()


async def played(program: Any, engine: TorchEngine, log: EpisodeLog) -> Episode:
    (episode,) = await programs(program, log).play(tasks()[:1], Played(engine))
    return episode


async def test_answers_stand_in_the_order_of_their_leaves_whatever_was_asked_first(
    engine: TorchEngine, log: EpisodeLog
) -> None:
    async def episode(task: Task, model: Voice, world: World) -> dict[str, Any]:
        first = await model.ask([5, 6, 7], max_tokens=2)
        await model.ask([8, 9], max_tokens=3)
        await model.ask([*first.context, 4], max_tokens=2)  # it goes on where the first stopped
        return {"score": 1.0, "turn_rewards": [0.25, 0.5, 2.0], "correct": True}

    found = await played(episode, engine, log)
    assert [len(leaf.turns) for leaf in found.leaves] == [2, 1]
    assert found.returned == {"score": 1.0, "correct": True, "turn_rewards": [0.25, 2.0, 0.5]}
    assert found.answers == 3
    # Two tokens, the one that it was given, two more; and the other leaf's three.
    assert list(found.answer_ends()) == [1, 4, 7]


async def test_samples_say_what_each_answer_has_earned(engine: TorchEngine, log: EpisodeLog) -> None:
    async def episode(task: Task, model: Voice, world: World) -> None:
        first = await model.ask([5, 6, 7], max_tokens=2)
        await model.ask([*first.context, 4], max_tokens=2)

    found = await played(episode, engine, log)
    found.reward = RewardResult(1.0, {"environment": 1.0}, turns=(0.25,))
    (row,) = sample_rows([Group(PROMPT, [found])], 1, lambda ids: [""] * len(ids))
    assert [(turn["by"], turn.get("earned")) for turn in row.turns] == [
        ("model", 0.25),
        ("environment", None),
        ("model", None),
    ]


async def test_later_answers_and_the_score_may_be_left_out(engine: TorchEngine, log: EpisodeLog) -> None:
    async def episode(task: Task, model: Voice, world: World) -> dict[str, Any]:
        await model.ask([5, 6, 7], max_tokens=2)
        await model.ask([8, 9], max_tokens=2)
        return {"turn_rewards": [0.5]}

    assert (await played(episode, engine, log)).returned == {"score": 0.0, "turn_rewards": [0.5, 0.0]}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([0.0, 1.0], "2 turn_rewards for 1 answers of the model"),
        (["one"], "could not convert string to float|text is not a number"),
        (7, "not iterable"),
    ],
)
async def test_more_than_there_are_answers_and_what_is_no_number_is_refused(
    engine: TorchEngine, log: EpisodeLog, given: Any, problem: str
) -> None:
    async def episode(task: Task, model: Voice, world: World) -> dict[str, Any]:
        await model.ask([5, 6, 7], max_tokens=2)
        return {"turn_rewards": given}

    with pytest.raises(ProgramError, match=problem):
        await played(episode, engine, log)


async def test_of_branches_that_ask_beside_each_other_nobody_knows_the_order(
    engine: TorchEngine, log: EpisodeLog
) -> None:
    async def episode(task: Task, model: Voice, world: World) -> dict[str, Any]:
        await model.branch("left").ask([5, 6, 7], max_tokens=2)
        await model.branch("right").ask([8, 9], max_tokens=2)
        return {"turn_rewards": [1.0, 1.0]}

    with pytest.raises(ProgramError, match="the program asks in parallel branches"):
        await played(episode, engine, log)
