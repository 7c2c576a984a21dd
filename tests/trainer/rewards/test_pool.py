"""Groups are scored by real worker processes; whatever a function does, its sample is named and no process is left."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_episodes import an_episode

from rljob_api.spec.reward import Reward
from rljob_trainer.episodes.episode import Group, Prompt
from rljob_trainer.errors import JobFileError, RewardError, RewardWorkerError
from rljob_trainer.rewards import maths
from rljob_trainer.rewards.frames import Scored, Unframing, frame
from rljob_trainer.rewards.pool import RewardPool
from rljob_trainer.rewards.rules import RewardVerdict
from rljob_trainer.rewards.terms import Outcome, Response, RewardFailure, Term, term_specs

HERE = Path(__file__).parent


def custom(function: str, **more: Any) -> dict[str, Any]:
    return {"type": "custom", "function": f"custom_rewards:{function}", **more}


def reward(*functions: dict[str, Any], **settings: Any) -> Reward:
    return Reward.model_validate({"functions": list(functions), "timeoutSeconds": 1, "workers": 1, **settings})


def responses(*texts: str, answer: str | None = "7", source: str = "s", **columns: Any) -> list[Response]:
    return [
        Response("What?", text, answer, source, len(text), "stop", columns, label=f"sample {i}")
        for i, text in enumerate(texts)
    ]


@asynccontextmanager
async def pool(*functions: dict[str, Any], longest: int = 100, **settings: Any) -> AsyncIterator[RewardPool]:
    async with RewardPool(reward(*functions, **settings), longest_response=longest, paths=[HERE]) as opened:
        yield opened
        pids = opened.worker_pids
    assert opened.worker_pids == []
    assert not any(psutil.pid_exists(pid) for pid in pids)


def group(*texts: str, answer: str = "7") -> Group:
    prompt = Prompt(ordinal=5, epoch=0, row=3, source="s", text="1+6=", token_ids=(1,), answer=answer)
    return Group(prompt, [an_episode(prompt, i, [0] * len(text), text=text) for i, text in enumerate(texts)])


async def test_quick_rules_need_no_process() -> None:
    async with pool({"type": "exactMatch"}, {"type": "gsm8k"}, {"type": "length"}) as opened:
        assert opened.worker_pids == []
        results = await opened.score(group("7", "#### 7", "8"))
    assert [r.parts["exactMatch"] for r in results] == [1.0, 0.0, 0.0]
    assert [r.parts["gsm8k"] for r in results] == [0.0, 1.0, 0.0]
    assert [r.prediction for r in results] == ["7", "#### 7", "8"]
    assert [r.correct for r in results] == [True, False, False]


async def test_what_single_answers_have_earned_is_weighed_and_added_up_by_answer() -> None:
    earned = {"score": 1.0, "turn_rewards": [0.5, -0.25]}
    asked = [
        Response("", "", None, "s", 3, "stop", label="two turns", returned=earned, answers=3),
        Response("", "", None, "s", 3, "stop", label="a number", returned=2.0, answers=3),
        Response("", "", None, "s", 3, "stop", label="without score", returned={"turn_rewards": [1, 2, 3]}, answers=3),
    ]
    functions = ({"type": "environment", "weight": 2.0}, custom("each_answer", weight=-1.0))
    async with pool(*functions) as opened:
        two, plain, without = await opened.score_responses(asked)
    assert (two.score, two.turns) == (1.25, (0.5, -0.25))
    assert two.parts == {"environment": 1.25, "custom": 1.25}
    assert (plain.score, plain.turns) == (2.0, ())
    assert (without.score, without.turns) == (6.0, (1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ({"turn_rewards": [1.0, 2.0]}, "it returned 2 turn_rewards for an episode with 1 answers"),
        ({"score": 1.0, "turn_rewards": "12"}, "its turn_rewards are '12' (str); return a list with a number for each"),
        ({"score": 1.0, "turn_rewards": 3}, "its turn_rewards are 3 (int)"),
        ({"turn_rewards": [float("nan")]}, "it returned the score nan"),
        ({"turn_rewards": []}, "it returned a mapping without 'score'"),
    ],
)
async def test_rewards_of_answers_that_cannot_be_used_are_named(returned: Any, problem: str) -> None:
    asked = [Response("", "", None, "s", 3, "stop", label="sample 1", returned=returned)]
    async with pool(custom("each_answer")) as opened:
        with pytest.raises(RewardError, match=re.escape(problem)):
            await opened.score_responses(asked)


async def test_score_is_the_weighted_sum_of_the_parts_and_the_overlong_punishment() -> None:
    async with pool(
        {"type": "exactMatch", "name": "right", "weight": 2.0},
        {"type": "pattern", "pattern": r"^\d+$", "weight": 0.5},
        custom("count_letters", weight=-0.1),
        longest=10,
        overlong={"bufferTokens": 4, "penalty": 1.0},
    ) as opened:
        right, long = await opened.score(group("7", "12345678"))
    assert right.parts == {"right": 1.0, "pattern": 1.0, "custom": 1.0, "overlong": 0.0}
    assert right.score == pytest.approx(2.0 + 0.5 - 0.1)
    # 8 tokens, two beyond the 6 that are free, of a buffer of 4.
    assert long.parts == {"right": 0.0, "pattern": 1.0, "custom": 8.0, "overlong": -0.5}
    assert long.score == pytest.approx(0.5 - 0.8 - 0.5)


async def test_terms_apply_to_their_sources_only() -> None:
    async with pool(
        {"type": "exactMatch", "sources": ["a"]},
        {"type": "pattern", "pattern": "7", "sources": ["b"]},
        {"type": "length", "params": {"coefficient": -1.0}},
    ) as opened:
        opened.check_sources(["a", "b"])
        assert [opened.in_processes(source) for source in ("a", "b")] == [False, True]  # a pattern may take for ever
        (of_a,) = await opened.score_responses(responses("7", source="a"))
        (of_b,) = await opened.score_responses(responses("7", source="b"))
        with pytest.raises(JobFileError, match="no data source 'b'"):
            opened.check_sources(["a"])
    assert of_a.parts == {"exactMatch": 1.0, "length": -1.0}
    assert of_b.parts == {"pattern": 1.0, "length": -1.0}
    async with pool({"type": "exactMatch", "sources": ["a"]}) as opened:
        with pytest.raises(JobFileError, match="none applies to the data source 'c'"):
            await opened.score_responses(responses("7", source="c"))


async def test_a_custom_function_gets_what_it_names() -> None:
    async with pool(custom("everything", name="all"), custom("by_column", params={"bonus": 0.5})) as opened:
        (result,) = await opened.score_responses(responses("four", level=3, other="x"))
    assert result.parts == {"all": 4.0, "custom": 3.5}
    assert result.correct is True
    standard = ["answer", "conversation", "finish", "prompt", "response", "returned", "source", "tokens"]
    names = sorted([*standard, "level", "other"])
    assert result.prediction == str(names)


async def test_async_functions_wait_together() -> None:
    async with pool(custom("meets"), timeoutSeconds=60) as opened:
        results = await opened.score_responses(responses(*["good"] * 50, expected=50))
    assert [r.score for r in results] == [50.0] * 50


@pytest.mark.parametrize(
    ("does", "problem"),
    [
        ("hang", "no result within 1 s; its worker process was killed"),
        ("sleep", "no result within 1 s; its worker process was killed"),
        ("raise", "KeyError: 'no such thing'"),
        ("exit", "SystemExit: 3"),
        (
            "crash",
            "its worker process was ended by signal SIGKILL, which the function sent itself; this happened twice",
        ),
        (
            "quit",
            "it ended its worker process (exit code 3); this happened twice, the second time with this sample alone",
        ),
        ("nan", "it returned the score nan, which is not a finite number"),
        ("inf", "it returned the score inf, which is not a finite number"),
        ("nothing", "it returned None (NoneType), which is not a number"),
        ("text", "it returned '1.0' (str), which is not a number"),
        ("list", "it returned [1.0] (list), which is not a number; return one, or a mapping with 'score'"),
        ("mapping", "it returned a mapping without 'score', only with 'value'"),
    ],
)
async def test_a_failing_function_is_reported_with_its_sample(does: str, problem: str) -> None:
    async with pool(custom("misbehaves", name="mine")) as opened:
        with pytest.raises(RewardError) as raised:
            await opened.score(group("fine", does, "fine"))
        message = str(raised.value)
        remedy = "onError: score to give such samples errorScore, or to drop to skip their groups, in a new job"
        for part in ("'mine' (custom_rewards:misbehaves)", "sample 1 of prompt 5 (s, row 3)", problem, "'1+6='", does):
            assert part in message
        assert remedy in message
        # The pool goes on: the next group is scored, by a new process where the old one is gone.
        assert [r.score for r in await opened.score(group("fine"))] == [1.0]


async def test_a_failing_sample_gets_the_score_that_the_job_says_and_the_others_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    functions = (custom("misbehaves", name="mine"), {"type": "exactMatch"}, custom("count_letters", name="letters"))
    async with pool(*functions, onError="score", errorScore=-3.0, workers=2) as opened:
        results = await opened.score(group("7", "hang", "raise", "crash", "7"))
        assert opened.failures == 3
    assert [r.score for r in results] == [3.0, -3.0, -3.0, -3.0, 3.0]
    assert results[1].parts == {"mine": -3.0, "exactMatch": 0.0, "letters": 4.0}
    assert [r.error is not None for r in results] == [False, True, True, True, False]
    assert "no result within 1 s" in str(results[1].error)
    assert sum("errorScore = -3" in record.getMessage() for record in caplog.records) == 3


async def test_an_async_function_that_never_answers_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async with pool(custom("judge"), onError="score") as opened:
        results = await opened.score_responses(responses("good", "never", "good"))
        assert [r.error is not None for r in results] == [False, True, False]
        assert "no result within 1 s" in str(results[1].error)


async def test_an_async_function_that_blocks_everybody_is_found() -> None:
    async with pool(custom("judge"), custom("count_letters", name="letters"), onError="score") as opened:
        results = await opened.score_responses(responses("good", "block", "good"))
    assert [r.error is not None for r in results] == [False, True, False]
    assert "'custom' (custom_rewards:judge)" in str(results[1].error)
    assert results[0].parts == {"custom": 2.0, "letters": 4.0}


async def test_mathematics_that_hangs_counts_as_wrong_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A model can write such a thing at any time: that must not stop a run, nor cost the other functions' parts."""
    functions = ({"type": "math"}, {"type": "pattern", "pattern": "boxed"})
    async with pool(*functions, timeoutSeconds=3) as opened:
        hung, fine = await opened.score_responses(responses(r"\boxed{10^{10^{10}}}", r"\boxed{\frac{14}{2}}"))
    assert hung.parts == {"math": 0.0, "pattern": 1.0}
    assert hung.correct is False
    assert "no result within 3 s" in str(hung.error)
    assert fine.parts == {"math": 1.0, "pattern": 1.0}
    assert fine.error is None
    assert any("counts as wrong" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("other", [{}, {"custom": RewardFailure("custom", "ended by SIGKILL", ended=True, lost=True)}])
async def test_mathematics_whose_worker_was_lost_twice_is_no_wrong_answer(other: Outcome) -> None:
    """Also beside another function whose worker was lost, and where mathematics itself hung beside that."""
    lost = RewardFailure(
        "math", "its worker process was ended by signal SIGKILL, twice in a row", ended=True, lost=True
    )
    hung = RewardFailure("math", "no result within 1 s", ended=True)
    (right,) = responses(r"\boxed{7}")
    opened = RewardPool(reward({"type": "math"}, custom("count_letters")), longest_response=100)
    fine: Outcome = {"custom": RewardVerdict(1.0)}
    for failure in (lost, hung) if other else (lost,):
        with pytest.raises(RewardWorkerError, match=r"(?s)SIGKILL.*Try again") as raised:
            opened._result(right, fine | other | {"math": failure})
        assert raised.value.exit_code == 75
    assert opened._result(right, fine | {"math": hung}).score == 1.0


def test_mathematics_that_gives_up_counts_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    maths._prepare()
    monkeypatch.setattr(maths, "_SECONDS", 0.01)
    settings = reward({"type": "math"})
    (hard,) = responses("+".join([r"\frac{1}{2}"] * 160).join((r"\boxed{", "}")))
    given_up = Term(term_specs(settings)[0]).score(hard)
    result = RewardPool(settings, longest_response=100)._result(hard, {"math": given_up})
    assert (result.score, result.correct) == (0.0, False)
    assert "reading the response takes more than 0.01 s of processor time" in str(result.error)


async def test_a_pattern_that_takes_exponential_time_is_ended() -> None:
    async with pool({"type": "pattern", "pattern": "(a+)+$"}) as opened:
        with pytest.raises(RewardError, match=r"(?s)'pattern'.*no result within 1 s"):
            await opened.score_responses(responses("a" * 40 + "b"))


async def test_what_a_function_started_ends_with_its_worker() -> None:
    async with pool(custom("misbehaves"), timeoutSeconds=3) as opened:
        worker = psutil.Process(opened.worker_pids[0])
        task = asyncio.create_task(opened.score(group("child")))
        while not (children := worker.children()):
            assert not task.done(), "it started nothing within its time"
            await asyncio.sleep(0.01)
        with pytest.raises(RewardError):
            await task
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


async def test_a_cancelled_call_leaves_the_pool_usable() -> None:
    async with pool(custom("misbehaves"), timeoutSeconds=100) as opened:
        task = asyncio.create_task(opened.score(group("sleep")))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [r.score for r in await opened.score(group("fine"))] == [1.0]


async def test_a_worker_that_ended_while_idle_is_replaced_and_no_sample_is_blamed() -> None:
    async with pool(custom("misbehaves")) as opened:
        psutil.Process(opened.worker_pids[0]).kill()
        await asyncio.sleep(0.2)
        assert [r.score for r in await opened.score(group("fine"))] == [1.0]


async def test_the_term_that_hangs_is_named_whatever_was_called_before() -> None:
    functions = (custom("count_letters", name="letters"), custom("misbehaves", name="mine", sources=["b"]))
    async with pool(*functions, onError="score") as opened:
        both = responses("fine", source="b") + responses("four", source="a") + responses("hang", source="b")
        results = await opened.score_responses(both)
    assert [r.error is not None for r in results] == [False, False, True]
    assert "'mine' (custom_rewards:misbehaves)" in str(results[2].error)
    assert results[2].parts == {"letters": 4.0, "mine": 0.0}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({"type": "custom", "function": "no_such_module:score"}, "no_such_module:score cannot be imported: Module"),
        ({"type": "custom", "function": "no_such_module:score"}, "no_such_module must be beside the job file"),
        ({"type": "custom", "function": "imports_something_absent:score"}, "no_such_package must be beside the job"),
        (custom("no_such_function"), "cannot be imported: AttributeError"),
        ({"type": "custom", "function": "custom_rewards:HERE"}, "cannot be imported"),
        ({"type": "custom", "function": "sys:path"}, "sys:path is not a function"),
        (custom("by_column", params={"bonsu": 1}), "has no parameter 'bonsu'; its parameters are bonus, level"),
        (
            {"type": "exactMatch", "params": {"partial": "yes"}},
            """params.partial: must be true or false, not the text "yes", for 'exactMatch' (exactMatch); """
            "write true or false, without quotes",
        ),
        (
            {"type": "gsm8k", "params": {"method": "lenient"}},
            """params.method: must be one of strict, flexible, not the text "lenient", for 'gsm8k' (gsm8k); """
            "use one of them",
        ),
        ({"type": "gsm8k", "params": {"method": "Strict"}}, "did you mean strict?"),
        ({"type": "length", "params": {"freeTokens": 1.5}}, "params.freeTokens: must be a whole number, not 1.5"),
        ({"type": "length", "params": {"coefficient": True}}, "params.coefficient: must be a number, not true"),
        (
            {"type": "gsm8k", "params": {"formatScroe": 1.0}},
            "params: there is no parameter 'formatScroe', for 'gsm8k' (gsm8k); did you mean formatScore?",
        ),
        ({"type": "gsm8k", "params": {"response": "72"}}, "its parameters are method, formatScore"),
        ({"type": "pattern", "pattern": "("}, "not a regular expression"),
        ({"type": "pattern", "pattern": "a{99999999999}"}, "not a regular expression"),
    ],
)
async def test_a_function_that_cannot_be_used_is_refused_before_the_first_sample(
    function: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobFileError) as raised:
        async with pool(function):
            pass
    assert message in str(raised.value)
    assert "spec.reward.functions[0]" in str(raised.value)


def test_two_functions_need_two_names() -> None:
    with pytest.raises(JobFileError, match=r"functions\[0\].name: 'length' appears twice"):
        RewardPool(reward({"type": "length"}, {"type": "gsm8k", "name": "length"}), longest_response=1)


async def test_workers_do_not_import_torch() -> None:
    async with pool({"type": "math"}, custom("count_letters"), timeoutSeconds=20) as opened:
        await opened.score_responses(responses("7"))
        maps = Path(f"/proc/{opened.worker_pids[0]}/maps").read_text()
    assert "libtorch" not in maps


def test_workers_die_with_a_killed_driver(tmp_path: Path) -> None:
    """kill -9 on the driver while a function hangs: nothing is left."""
    program = f"""
import asyncio
from rljob_api.spec.reward import Reward
from rljob_trainer.rewards.pool import RewardPool
from rljob_trainer.rewards.terms import Response

async def main():
    spec = Reward.model_validate({{
        "functions": [{{"type": "custom", "function": "custom_rewards:misbehaves"}}],
        "workers": 2,
        "timeoutSeconds": 600,
    }})
    async with RewardPool(spec, longest_response=1, paths=[{str(HERE)!r}]) as pool:
        print(*pool.worker_pids, flush=True)
        await pool.score_responses([Response("p", "hang", None, "s", 1, "stop")] * 2)

asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    ) as driver:
        assert driver.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        assert len(workers) == 2
        driver.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers))


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


async def test_what_was_scored_before_a_crash_is_not_asked_again(tmp_path: Path) -> None:
    """Results wait for company before they are sent: those of a worker that is killed must not be lost. Only the sample
    at which it died is scored once more."""
    journal = tmp_path / "calls"
    texts = [*(f"before {i}" for i in range(20)), "crash", *(f"after {i}" for i in range(20))]
    async with pool(custom("counts_calls"), onError="score") as opened:
        results = await opened.score_responses(responses(*texts, journal=str(journal)))
    assert [r.error is not None for r in results] == [text == "crash" for text in texts]
    assert sorted(journal.read_text().splitlines()) == sorted([*texts, "crash"])


async def test_calls_at_the_same_time_get_their_own_results() -> None:
    async with pool(custom("count_letters"), workers=2) as opened:
        texts = [["x" * (i + j) for j in range(5)] for i in range(40)]
        calls = (opened.score_responses(responses(*several)) for several in texts)
        scored = await asyncio.gather(*calls)
    assert [[r.score for r in results] for results in scored] == [[float(len(t)) for t in several] for several in texts]


@pytest.mark.parametrize("size", [1, 3, 64])
def test_messages_are_found_however_their_bytes_arrive(size: int) -> None:
    messages = ["a", ["b"] * 50, Scored(3, {"mine": RewardVerdict(1.0)}, 7)]
    data = b"".join(map(frame, messages))
    unframing = Unframing()
    arrived = [m for start in range(0, len(data), size) for m in unframing.messages(data[start : start + size])]
    assert arrived == messages


async def test_the_columns_of_a_prompt_reach_the_function() -> None:
    scored = group("x")
    scored.prompt = Prompt(0, 0, 0, "s", "p", (1,), None, {"level": 4})
    async with pool(custom("by_column")) as opened:
        assert (await opened.score(scored))[0].score == 4.0


async def test_failures_of_quick_rules_follow_the_same_policy(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with pool({"type": "gsm8k"}) as opened:
        with pytest.raises(RewardError, match=r"(?s)'gsm8k'.*sample 0 of prompt 5.*has no number"):
            await opened.score(group("7", answer="seven"))
    async with pool({"type": "gsm8k"}, onError="score", errorScore=0.25) as opened:
        (result,) = await opened.score(group("7", answer="seven"))
    assert result.score == 0.25
    assert result.error is not None
