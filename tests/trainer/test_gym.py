"""Tasks of reasoning-gym with the real package, in an environment of its own: rows, the split, and scores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import pytest_asyncio
from gym_environment import gym_python
from sandbox_places import why_not

from rljob_api.spec.data import TaskSpec
from rljob_api.spec.reward import Reward
from rljob_trainer.data.feed import PromptFeed, Source
from rljob_trainer.errors import CheckpointError, JobFileError, RewardError, RewardWorkerError, UnreachableError
from rljob_trainer.gym import inside
from rljob_trainer.gym import process as of_process
from rljob_trainer.gym.process import GymProcess, WrongTaskError, as_asked, own_environment
from rljob_trainer.gym.rows import GymRows
from rljob_trainer.gym.scoring import prepared, score_answer
from rljob_trainer.rewards.pool import RewardPool
from rljob_trainer.rewards.reasoning_gym import reasoning_gym, tagged
from rljob_trainer.rewards.terms import Response
from rljob_trainer.world.protocol import WorldError
from rljob_trainer.world.sandbox import LocalSandbox, ProgramResult, SandboxLimits

# Unlike each other: texts, keys that are no text, partial scores, formulas that are evaluated, answers that raise; then
# others, and a data set that knows its size.
UNLIKE: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3},
    "rearc": {},
    "countdown": {"min_numbers": 3, "max_numbers": 3},
    "string_insertion": {},
    "prime_factorization": {},
}
MORE: dict[str, dict[str, int]] = {"basic_arithmetic": {}, "leg_counting": {}, "word_ladder": {}}
GUESSES = ["7", "", "x", "[1, 2", "A", "1 + 2", "2 × 3", " 12 ", "['A', 'B']"]

DIRECTLY = """
import json, sys
import reasoning_gym
from reasoning_gym.utils import extract_answer
for line in sys.stdin:
    asked = json.loads(line)
    if "text" in asked:
        print(json.dumps(extract_answer(asked["text"])))
        continue
    data = reasoning_gym.create_dataset(asked["name"], seed=asked["seed"], size=asked["size"], **asked["config"])
    entry = data[asked["index"]]
    scores = []
    for guess in [str(entry["answer"]), *asked["guesses"]]:
        try:
            scores.append(data.score_answer(guess, entry))
        except Exception:
            scores.append(None)
    print(json.dumps([entry["question"], entry["answer"], scores]))
"""
"""The package used as its page says, by nothing of ours. matplotlib, which cellpylib wants, is a name."""
_NO_MATPLOTLIB = """
import sys
from unittest.mock import MagicMock
for name in ("", ".pyplot", ".animation", ".collections", ".artist"):
    sys.modules["matplotlib" + name] = MagicMock()
for name in ("", ".mplot3d", ".mplot3d.axes3d", ".axes_grid1"):
    sys.modules["mpl_toolkits" + name] = MagicMock()
"""


def directly(asked: list[dict[str, Any]]) -> list[Any]:
    """What the package itself says, in a process of its own."""
    lines = "\n".join(map(json.dumps, asked))
    command = [gym_python(), "-c", _NO_MATPLOTLIB + DIRECTLY]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=own_environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def task(name: str = "chain_sum", size: int = 100, seed: int = 3, **config: Any) -> TaskSpec:
    return TaskSpec(type="reasoningGym", name=name, size=size, seed=seed, config=config, python=gym_python())


@pytest.fixture(scope="module")
def process() -> Iterator[GymProcess]:
    """Each test finds it at work or replaces it: its start takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_process, "_GRACE_SECONDS", 1.0)
        opened = GymProcess(gym_python(), row_seconds=1)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def held_by() -> Any:
    if reason := why_not("landlock"):
        pytest.skip(reason)
    return "landlock"


@pytest.fixture(scope="module")
def scored_rows() -> dict[str, dict[str, Any]]:
    return {name: GymRows(task(name, **config), held_out=False)[5] for name, config in UNLIKE.items()}


def sandbox_of(
    held_by: Any, seconds: float = 20.0, tasks: Mapping[str, dict[str, int]] = MappingProxyType(UNLIKE)
) -> LocalSandbox:
    limits = SandboxLimits(wall_seconds=seconds, cpu_seconds=seconds)
    asked = [as_asked(task(name, **config)) for name, config in tasks.items()]
    return LocalSandbox(held_by, limits, 1, prepared(asked, gym_python()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(held_by: Any) -> AsyncIterator[LocalSandbox]:
    """For tests after which it is as before."""
    async with sandbox_of(held_by) as opened:
        yield opened


@pytest.mark.asyncio(loop_scope="module")
async def test_scores_are_the_packages_own(sandbox: LocalSandbox, scored_rows: dict[str, dict[str, Any]]) -> None:
    partial, raised = await compared(sandbox, list(scored_rows.values()))
    # What the comparison is worth: both happen.
    assert partial
    assert raised


@pytest.mark.slow(stands_for="test_scores_are_the_packages_own")
async def test_so_are_those_of_further_tasks(held_by: Any) -> None:
    async with sandbox_of(held_by, tasks=MORE) as sandbox:
        await compared(sandbox, [GymRows(task(name, **config), held_out=False)[5] for name, config in MORE.items()])


async def compared(sandbox: LocalSandbox, rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Scores the right answers and ``GUESSES`` here and by the package; returns how many have a part of the score, and
    on how many scoring raises."""
    said = directly([{**row["problem"], "guesses": GUESSES} for row in rows])
    partial = raised = 0
    for row, (question, answer, scores) in zip(rows, said, strict=True):
        assert (row["question"], row["answer"]) == (question, answer)
        for guess, expected in zip([str(answer), *GUESSES], scores, strict=True):
            got = await score_answer(sandbox, row["problem"], guess)
            assert (got.score, got.raised) == (0.0 if expected is None else expected, expected is None), guess
            partial += 0 < got.score < 1
            raised += got.raised
    assert all(scores[0] == 1.0 for _, _, scores in said)
    return partial, raised


async def test_what_an_answer_does_when_it_is_evaluated_stays_in_its_fork(
    held_by: Any, scored_rows: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    row = scored_rows["string_insertion"]
    (tmp_path / "secret").write_text(str(row["answer"]))
    async with sandbox_of(held_by, seconds=2) as sandbox:

        async def score(answer: str) -> tuple[float, bool]:
            said = await score_answer(sandbox, row["problem"], answer)
            return said.score, said.unfinished

        # It is evaluated, and allowed to no more than any program of the sandbox.
        assert await score(f"list({str(row['answer'])!r})") == (0.1, False)
        assert await score(f"open({str(tmp_path / 'secret')!r}).read()") == (0.0, False)
        # What it prints is no score, nor is how it ends.
        forged = 'MADE\\n{"score": 1.0}\\n'
        assert await score(f"__import__('os').write(1, b'{forged}') and __import__('os')._exit(0)") == (0.0, True)
        assert await score("[0 for _ in iter(int, 1)]") == (0.0, True)
        # Nothing of it is there for the next one.
        poison = "__import__('sys').modules['rljob_prepared'].__dict__.update(score=None)"
        assert (await score(poison))[0] == 0.0
        assert await score(str(row["answer"])) == (1.0, False)


async def test_a_worker_that_is_killed_is_replaced_and_asked_again(
    held_by: Any, scored_rows: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = scored_rows["string_insertion"]
    async with sandbox_of(held_by) as sandbox:
        (worker,) = sandbox._workers
        killer = threading.Timer(0.5, os.kill, (worker._process.pid, signal.SIGKILL))
        killer.start()
        # It computes when its keeper is killed; asked again it ends by itself, and is as wrong as before.
        slow = "[0 for _ in __import__('time').sleep(1.5) or ()]"
        said = await score_answer(sandbox, row["problem"], slow)
        killer.join()
        assert (said.score, said.unfinished) == (0.0, False)
        assert worker not in sandbox._workers
        assert (await score_answer(sandbox, row["problem"], str(row["answer"]))).score == 1.0

        async def fails(*_: object) -> ProgramResult:
            raise WorldError("lost")

        monkeypatch.setattr(sandbox, "run", fails)
        with pytest.raises(RewardWorkerError, match="4 times in a row, so the answer could not be judged: lost"):
            await score_answer(sandbox, row["problem"], "7")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_problem_that_is_another_one_has_no_score(
    sandbox: LocalSandbox, scored_rows: dict[str, dict[str, Any]]
) -> None:
    problem = scored_rows["chain_sum"]["problem"]
    with pytest.raises(ValueError, match="differs from the one that the model was asked"):
        await score_answer(sandbox, {**problem, "digest": "0" * 16}, "7")
    with pytest.raises(RewardWorkerError, match="the problem was not generated"):
        await score_answer(sandbox, {**problem, "config": {"min_terms": 0}}, "7")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_reward_finds_answers_between_tags(
    sandbox: LocalSandbox, scored_rows: dict[str, dict[str, Any]]
) -> None:
    row = scored_rows["chain_sum"]
    right = row["answer"]
    verdict = await reasoning_gym(sandbox, f"So <answer>1</answer> or <answer> {right}\n</answer>.", row["problem"])
    assert (verdict.score, verdict.prediction, verdict.correct) == (1.0, right, True)
    assert verdict.details == {"answered": 1.0, "raised": 0.0, "unfinished": 0.0}
    verdict = await reasoning_gym(sandbox, right, row["problem"])
    assert (verdict.score, verdict.prediction, verdict.correct) == (0.0, None, False)
    assert verdict.details["answered"] == 0.0
    assert (await reasoning_gym(sandbox, f" {right}\n", row["problem"], answer_in="response")).score == 1.0
    assert (await reasoning_gym(sandbox, f"<final>{right}</final>", row["problem"], tag="final")).score == 1.0


@pytest.mark.slow(stands_for="test_the_reward_finds_answers_between_tags")
def test_tags_are_read_as_the_package_reads_them() -> None:
    texts = ["<answer>1</answer>", "none", "<answer>1", "1</answer><answer>2</answer>", "<answer></answer>"]
    texts += ["<answer>a</answer> <answer>\n b \n</answer> <answer>c", "<answer>a <answer>b</answer> c</answer>"]
    assert [tagged(text, "answer") for text in texts] == directly([{"text": text} for text in texts])


def test_rows_are_made_in_any_order_and_the_same_again(process: GymProcess) -> None:
    rows = GymRows(task(), held_out=False)
    first = {index: rows[index] for index in (40, 7, 99, 0)}
    assert len(rows) == 100
    assert {index: rows[index] for index in (0, 7, 40, 99)} == first
    # In another process, too.
    asked = as_asked(task())
    assert {index: process.row(asked, index, held_out=False) for index in first} == first
    # Nine in ten are the package's problems of that seed and place.
    problems = [rows[index]["problem"] for index in range(100)]
    assert [problem["index"] for problem in problems] == list(range(100))
    own = [problem for problem in problems if problem["seed"] == 3]
    assert len(own) > 75
    said = directly([{**problem, "guesses": []} for problem in problems[:20]])
    assert [rows[index]["question"] for index in range(20)] == [question for question, _, _ in said]


def test_no_question_of_training_is_one_of_validation() -> None:
    """Of 200 questions, so that all of either side are met."""
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    training = {
        row["question"] for row in map(GymRows(task(size=2000, **small), held_out=False).__getitem__, range(2000))
    }
    for seed in (3, 4, 1000):
        held_out = GymRows(task(size=300, seed=seed, **small), held_out=True)
        questions = {held_out[index]["question"] for index in range(300)}
        assert len(questions) > 5
        assert not questions & training
    # The package's own seeds would not have done it.
    shifted = directly(
        [{**as_asked(task(size=9, seed=seed, **small)), "index": i, "guesses": []} for seed, i in [(3, 1), (4, 0)]]
    )
    assert shifted[0][0] == shifted[1][0]


def test_a_task_without_enough_questions_for_a_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task of the package has but one question; this one has."""
    entry = {"question": "1 + 1 =", "answer": "2", "metadata": {}}
    monkeypatch.setattr(inside, "dataset_of", lambda *_: [entry])
    asked = {"name": "sums", "config": {}, "seed": 1, "size": 1}
    assert inside.problem_of(asked, 0, inside.is_held_out("1 + 1 ="))["answer"] == "2"
    with pytest.raises(inside.TaskError, match="has too few different ones"):
        inside.problem_of(asked, 0, not inside.is_held_out("1 + 1 ="))


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"name": "chain_sun"}, "name", "no task 'chain_sun'; did you mean chain_sum?"),
        ({"name": "composite"}, "name", "list its tasks as several parts"),
        ({"config": {"min_term": 3}}, "config", "no setting 'min_term'; did you mean min_terms?"),
        ({"config": {"size": 3}}, "config", "size is a field of the task itself"),
        ({"config": {"min_terms": 9, "max_terms": 2}}, "config", "max_terms must be >= min_terms"),
        ({"config": {"min_terms": "two"}}, "config", "does not accept it"),
    ],
)
def test_what_the_package_does_not_know_is_named(changes: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(WrongTaskError) as raised:
        GymRows(task().model_copy(update=changes), held_out=False)
    assert raised.value.field == field
    assert message in str(raised.value)


def test_a_python_without_the_package_says_how_to_install_it(tmp_path: Path) -> None:
    for python in (None, str(tmp_path / "nowhere")):
        with pytest.raises(JobFileError, match="pip install reasoning-gym==0\\.1\\.25"):
            GymRows(task().model_copy(update={"python": python}), held_out=False)


def test_and_says_so_as_often_as_it_is_asked() -> None:
    process = GymProcess(sys.executable)
    for _ in range(2):
        with pytest.raises(JobFileError, match="pip install reasoning-gym==0\\.1\\.25"):
            process.check("chain_sum", {}, 0, 10)
        assert process.pid is None


def test_a_process_that_is_killed_is_replaced(process: GymProcess) -> None:
    asked = as_asked(task())
    before = process.row(asked, 1, held_out=False)
    lost = process.pid
    assert lost is not None
    os.kill(lost, signal.SIGKILL)
    assert process.row(asked, 1, held_out=False) == before
    assert process.pid != lost


@pytest.mark.slow(stands_for="test_a_process_that_is_killed_is_replaced")
def test_a_process_that_hangs_is_replaced_and_then_given_up(
    process: GymProcess, caplog: pytest.LogCaptureFixture
) -> None:
    asked = as_asked(task())
    process.row(asked, 1, held_out=False)
    assert process.pid is not None
    # Of one that was stopped in the middle only the time is known.
    os.kill(process.pid, signal.SIGSTOP)
    assert process.row(asked, 2, held_out=False)["problem"]["index"] == 2
    assert "no answer within" in caplog.text
    # Some hundred thousand of the slowest problems.
    slow = as_asked(task("knight_swap", size=10, max_attempts=10**9, min_steps=10**6, max_steps=10**6))
    with pytest.raises(UnreachableError, match="was lost 3 times in a row"):
        process.row(slow, 0, held_out=True)


def feed_of(spec: TaskSpec, rows: Any = None) -> PromptFeed:
    class Words:
        """Token ids of a text, as far as this needs them."""

        settings = None
        date = None
        needed: tuple[Any, ...] = ()
        never_null: tuple[Any, ...] = ()

        def check_columns(self, *_: object) -> None: ...

        def encode(self, given: list[Mapping[str, Any]], places: list[str]) -> list[Any]:
            from rljob_trainer.data.tokenisation import EncodedPrompt

            return [
                EncodedPrompt(row["question"], tuple(row["question"].encode()), row["answer"], dict(row), False)
                for row in given
            ]

    encoder: Any = Words()
    return PromptFeed([Source("sums", rows or GymRows(spec, held_out=False), encoder)], seed=1)


def test_a_run_goes_on_with_the_same_problems_and_refuses_those_of_another_version() -> None:
    feed = feed_of(task())
    for _ in range(10):
        feed.next()
    state = json.loads(json.dumps(feed.state_dict()))
    assert state["makers"] == {
        "sums": f"reasoning-gym 0.1.25 (Python {sys.version_info.major}.{sys.version_info.minor})"
    }
    following = [feed.next() for _ in range(20)]
    again = feed_of(task())
    again.load_state_dict(state)
    assert [again.next() for _ in range(20)] == following

    state["makers"]["sums"] = state["makers"]["sums"].replace("0.1.25", "0.1.24")
    with pytest.raises(CheckpointError, match=r"generated by reasoning-gym 0\.1\.24 .* now by reasoning-gym 0\.1\.25"):
        feed_of(task()).load_state_dict(state)
    changed = feed_of(task(min_terms=3))
    state["makers"] = changed.state_dict()["makers"]
    with pytest.raises(CheckpointError, match="data source 'sums'"):
        changed.load_state_dict(state)


async def test_a_pool_scores_by_the_package(held_by: Any, scored_rows: dict[str, dict[str, Any]]) -> None:
    row = scored_rows["chain_sum"]
    reward = Reward.model_validate(
        {"functions": [{"type": "reasoningGym"}], "sandbox": {"isolation": held_by, "workers": 1}}
    )
    pool = RewardPool(reward, longest_response=64, gym=prepared([as_asked(task())], gym_python()))

    def response(text: str, columns: Mapping[str, Any]) -> Response:
        return Response(row["question"], text, row["answer"], "sums", 4, "stop", columns, label="sample 1")

    async with pool:
        right, without = await pool.score_responses(
            [response(f"<answer>{row['answer']}</answer>", row), response("I do not know", row)]
        )
        assert (right.score, right.correct, right.details["reasoningGym.answered"]) == (1.0, True, 1.0)
        assert (without.score, without.correct, without.details["reasoningGym.answered"]) == (0.0, False, 0.0)
        with pytest.raises(RewardError, match="has no column 'problem'"):
            await pool.score_responses([response("<answer>1</answer>", {})])
