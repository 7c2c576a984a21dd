"""Functions written for verl and TRL run unchanged; what cannot be called is refused in words, before anything runs.

Expected values: what verl's ``NaiveRewardManager`` and TRL's ``GRPOTrainer`` document.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rljob_api.spec.reward import Reward
from rljob_trainer.errors import JobFileError, RewardError
from rljob_trainer.rewards.pool import RewardPool
from rljob_trainer.rewards.signatures import Parameters, SignatureError, convention_of, has
from rljob_trainer.rewards.terms import Response

HERE = Path(__file__).parent


def sample(response: str, columns: Mapping[str, Any] | None = None, **more: Any) -> Response:
    known: dict[str, Any] = {"answer": None, "source": "part", "tokens": 5, "finish": "stop", **more}
    return Response("What?", response, columns=columns or {}, **known)


async def scored(function: str, *samples: Response, **more: Any) -> list[Any]:
    settings = {"functions": [{"type": "custom", "function": f"foreign_rewards:{function}", **more}], "workers": 1}
    async with RewardPool(Reward.model_validate(settings), longest_response=9, paths=[HERE]) as pool:
        return await pool.score_responses(samples)


async def test_verls_function_returns_a_number_or_a_dictionary_whose_numbers_become_metrics() -> None:
    truth = {"target": ["Paris", "paris"]}
    row = {"data_source": "search", "reward_model": {"ground_truth": truth}, "extra_info": {"split": "train"}}
    number, dictionary = await scored(
        "compute_score",
        sample("72", answer="72", reference="72", data_source="openai/gsm8k"),
        sample("Paris", row, answer=str(truth), reference=truth, data_source="search", finish="length"),
        params={"bonus": 0.25},
    )
    assert (number.score, number.details) == (1.0, {})
    assert (dictionary.score, dictionary.correct, dictionary.prediction) == (0.5, True, "Paris")
    # verl counts a question and its answer as two turns.
    assert dictionary.details == {"custom.split": 1.0, "custom.turns": 2.0, "custom.cut": 1.0, "custom.bonus": 0.25}
    assert dictionary.parts == {"custom": 0.5}


async def test_verls_data_source_is_the_parts_name_where_no_column_says_it() -> None:
    (result,) = await scored("compute_score", sample("72", answer="72", source="openai/gsm8k"), params={"bonus": 0})
    assert result.score == 1.0


async def test_verls_function_may_be_async() -> None:
    samples = [sample("a" * 10 * i, {"extra_info": {"index": i}}, answer="") for i in range(4)]
    results = await scored("compute_score_by_a_service", *samples)
    assert [r.score for r in results] == [0.0, 0.1, 0.2, 0.3]
    assert [r.details["custom.index"] for r in results] == [0, 1, 2, 3]


async def test_a_function_has_no_more_metrics_than_a_few() -> None:
    with pytest.raises(RewardError, match="it returned 33 numbers besides the score; at most 32 are allowed"):
        await scored("many_numbers", sample("a", answer="a"))


async def test_trls_functions_of_texts() -> None:
    texts = (" blue.", " in the sky.")
    assert [r.score for r in await scored("length_reward", *map(sample, texts))] == [6.0, 12.0]
    results = await scored(
        "reference_reward",
        sample(r" The solution is \boxed{2}.", {"ground_truth": "2"}),
        sample(r" The solution is \boxed{6}.", {"ground_truth": "5"}),
    )
    assert [r.score for r in results] == [1.0, 0.0]
    assert [r.score for r in await scored("awaited", sample("x"), sample(""))] == [1.0, 0.0]


async def test_trls_functions_of_conversations() -> None:
    asked = [{"role": "user", "content": "What is (1 + 2) * 4?"}]
    said = (
        "<think>The sum of 1 and 2 is 3, times 4 is 12.</think><answer>(1 + 2) * 4 = 12</answer>",
        "(3 + 1) * 2 = 8.",
    )
    results = await scored("format_reward", *(sample(text, messages=asked, conversational=True) for text in said))
    assert [r.score for r in results] == [1.0, 0.0]


async def test_trls_functions_get_columns_as_lists_and_messages_where_the_row_has_messages() -> None:
    row = {"prompt": "not given", "answer": 7, "level": 3}
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+6?"}]
    tool = [{"role": "assistant", "content": "1+6="}, {"role": "tool", "content": "7"}]
    texts, chat, turns = await scored(
        "what_it_gets",
        sample("7", row, answer="7", messages=asked),
        sample("7", row, answer="7", messages=asked, conversational=True),
        sample("7", row, answer="7", messages=asked, conversational=True, conversation=[*asked, *tool]),
    )
    assert texts.prediction == repr((["1+6?"], ["7"], [7]))
    assert chat.prediction == repr(([asked], [[{"role": "assistant", "content": "7"}]], [7]))
    assert turns.prediction == repr(([asked], [tool], [7]))


async def test_none_of_trls_leaves_the_sample_to_the_other_functions() -> None:
    settings = {
        "functions": [
            {"type": "custom", "function": "foreign_rewards:math_only", "weight": 2.0},
            {"type": "exactMatch"},
        ],
        "workers": 1,
    }
    async with RewardPool(Reward.model_validate(settings), longest_response=9, paths=[HERE]) as pool:
        maths, code = await pool.score_responses(
            [sample("4", {"task": "math"}, answer="4"), sample("4", {"task": "code"}, answer="4")]
        )
    assert (maths.score, maths.parts) == (3.0, {"custom": 1.0, "exactMatch": 1.0})
    assert (code.score, code.parts) == (1.0, {"exactMatch": 1.0})
    with pytest.raises(RewardError, match="it returned None, and no other function scores the sample"):
        await scored("math_only", sample("4", {"task": "code"}))


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("two_for_one", "it returned 2 rewards for 1 completion"),
        ("a_number", r"it returned 1.0 \(float\); a function that takes completions must return a list"),
    ],
)
async def test_what_no_function_of_trls_returns(function: str, problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        await scored(function, sample("x"))


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("mixed", r"takes response \(this trainer's\) and completions \(TRL's\), so its calling"),
        ("whole_batch", "verl's signature for whole batches"),
        ("token_lengths", "needs completion_ids, which is token ids, but reward functions get text here"),
        ("by_a_model", "needs reward_router_address, which is of a reward model, but none is served here"),
    ],
)
async def test_what_cannot_be_called_is_refused_when_workers_start(function: str, problem: str) -> None:
    with pytest.raises(JobFileError, match=problem):
        await scored(function, sample("x"))


def test_names_say_the_convention() -> None:
    def of(*names: str, optional: tuple[str, ...] = (), given: tuple[str, ...] = ()) -> str:
        return convention_of(Parameters(names, frozenset(optional)), given)

    assert of() == of("response", "ground_truth") == of("answer", "level") == of("response", "completion") == "rljob"
    assert of("solution_str", "ground_truth") == of("data_source", "solution_str", "level", given=("level",)) == "verl"
    assert of("completions", "answer", "source") == of("prompts", "completions", "log_extra", optional=("log_extra",))
    # What the job itself gives says nothing.
    assert of("response", "completions", given=("completions",)) == "rljob"
    with pytest.raises(SignatureError, match="trainer_state"):
        of("completions", "trainer_state")
    assert of("completions", "trainer_state", given=("trainer_state",)) == "trl"
    assert has("trl", ["prompt", "level"]) == ("prompts", "completions", "level")
