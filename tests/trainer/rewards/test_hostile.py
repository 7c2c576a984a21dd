"""Whatever is done to a worker, or by a function to its own: right scores for the others, and the true cause."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rljob_api.spec.reward import Reward
from rljob_trainer.errors import RewardError, RewardWorkerError, RLJobError
from rljob_trainer.rewards.pool import RewardPool
from rljob_trainer.rewards.terms import Response

HERE = Path(__file__).parent


def hostile(function: str, **more: Any) -> dict[str, Any]:
    return {"type": "custom", "function": f"hostile_rewards:{function}", **more}


@asynccontextmanager
async def pool(*functions: dict[str, Any], **settings: Any) -> AsyncIterator[RewardPool]:
    spec = Reward.model_validate({"functions": list(functions), "timeoutSeconds": 20, "workers": 1, **settings})
    async with RewardPool(spec, longest_response=100, paths=[HERE]) as opened:
        yield opened


def responses(*texts: str, **columns: Any) -> list[Response]:
    return [
        Response("What?", text, "7", "s", len(text), "stop", columns, label=f"sample {i}")
        for i, text in enumerate(texts)
    ]


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What a condition is once it is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    return found


def worker_at(marker: Path) -> int | None:
    text = marker.read_text() if marker.exists() else ""
    return int(text) if text else None


async def test_a_worker_killed_from_outside_costs_no_sample_its_score(tmp_path: Path) -> None:
    marker = tmp_path / "waiting"
    async with pool(hostile("waits_once")) as opened:
        scoring = asyncio.create_task(opened.score_responses(responses("a", "wait", "ccc", marker=str(marker))))
        os.kill(await until(lambda: worker_at(marker)), signal.SIGKILL)
        assert [r.score for r in await scoring] == [1.0, 4.0, 3.0]
        assert opened.failures == 0


@pytest.mark.parametrize("function", ["waits_once", "waits_once_async"])
async def test_time_in_which_a_worker_is_stopped_does_not_count(function: str, tmp_path: Path) -> None:
    """It has 3 s, of which the function takes 2, and is stopped for longer than what is left."""
    marker = tmp_path / "waiting"
    async with pool(hostile(function), timeoutSeconds=3) as opened:
        scoring = asyncio.create_task(opened.score_responses(responses("wait", "bb", marker=str(marker))))
        pid = await until(lambda: worker_at(marker))
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2.5)
        os.kill(pid, signal.SIGCONT)
        assert [r.score for r in await scoring] == [4.0, 2.0]
        assert opened.worker_pids == [pid]


async def test_a_worker_that_stays_stopped_is_replaced_and_the_sample_scored(tmp_path: Path) -> None:
    marker = tmp_path / "waiting"
    async with pool(hostile("waits_once"), timeoutSeconds=2) as opened:
        scoring = asyncio.create_task(opened.score_responses(responses("wait", "bb", marker=str(marker))))
        os.kill(await until(lambda: worker_at(marker)), signal.SIGSTOP)
        assert [r.score for r in await scoring] == [4.0, 2.0]


async def test_workers_killed_twice_from_outside_ask_to_try_again(tmp_path: Path) -> None:
    async with pool(hostile("tells_and_waits")) as opened:
        scoring = asyncio.create_task(opened.score_responses(responses("a", "wait", marker=str(tmp_path / "at"))))
        for killed in range(2):
            await until(lambda seen=killed: len(list(tmp_path.iterdir())) > seen)
            os.kill(opened.worker_pids[0], signal.SIGKILL)
            await until(lambda: scoring.done() or len(list(tmp_path.iterdir())) > 1)
        with pytest.raises(RewardWorkerError) as raised:
            await scoring
        assert raised.value.exit_code == 75
        message = str(raised.value)
        for part in ("(hostile_rewards:tells_and_waits)", "sample 1", "SIGKILL", "twice in a row", "Try again"):
            assert part in message


RAISED = {
    "interrupt": "KeyboardInterrupt",
    "cancelled": "CancelledError",
    "generator": "GeneratorExit: done",
    "exit": "SystemExit: wrong",
    "recursion": "RecursionError: maximum recursion depth exceeded",
    "memory": "MemoryError",
    "unreadable": "UnreadableError: (its text cannot be read: that raises RuntimeError)",
    "long": "x... (10000000 characters)",
    "surrogate": "ValueError: half \\ud83d of it",
}


@pytest.mark.parametrize("function", ["raises", "raises_async"])
async def test_whatever_a_function_raises_is_said_with_its_line_and_costs_no_worker(function: str) -> None:
    async with pool(hostile(function), onError="score", errorScore=-1) as opened:
        pids = opened.worker_pids
        *failed, fine = await opened.score_responses(responses(*RAISED, "fine"))
        assert opened.worker_pids == pids
    assert (fine.score, fine.error) == (1.0, None)
    for index, (result, cause) in enumerate(zip(failed, RAISED.values(), strict=True)):
        assert f"'custom' (hostile_rewards:{function}) failed on sample {index}: " in str(result.error)
        assert cause in str(result.error)
        assert f"({HERE / 'hostile_rewards.py'}, line " in str(result.error)
        assert len(str(result.error)) < 3000


UNUSABLE = {
    "float64": "it returned the score 1e+300, beyond +-1e+15",
    "digits": "it returned a score (int) beyond +-1e+15",
    "decimal": "it returned the score inf, which is not a finite number",
    "fraction": "it returned a score (Fraction) beyond +-1e+15",
    "norepr": "(NoRepr), which is not a number",
}


async def test_a_score_that_training_cannot_hold_is_refused_with_function_sample_and_value() -> None:
    async with pool(hostile("returns"), onError="score", errorScore=-1) as opened:
        *refused, fine = await opened.score_responses(responses(*UNUSABLE, "fine"))
    assert fine.score == 1.0
    for index, (result, cause) in enumerate(zip(refused, UNUSABLE.values(), strict=True)):
        assert f"'custom' (hostile_rewards:returns) failed on sample {index}: " in str(result.error)
        assert cause in str(result.error)
        assert result.score == -1.0


async def test_a_weighted_sum_that_training_cannot_hold_is_refused_with_the_sample() -> None:
    terms = (hostile("returns", name="one"), hostile("returns", name="two", weight=2))
    async with pool(*terms) as opened:
        with pytest.raises(RewardError) as raised:
            await opened.score_responses(responses("sum"))
    message = str(raised.value)
    for part in ("1 x 'one'", "2 x 'two' (hostile_rewards:returns)", "sample 0", "2.7e+15", "lower the weights"):
        assert part in message


async def test_predictions_are_plain_texts_of_a_length_that_can_be_kept() -> None:
    async with pool(hostile("returns")) as opened:
        own, half, book, same, other = await opened.score_responses(
            responses("own text", "half", "book", "book", "other book")
        )
    assert (own.score, own.prediction, type(own.prediction), own.correct) == (1.0, "seven", str, True)
    assert half.prediction == "\\ud83d"
    assert hashlib.sha256(b"a" * 10**7).hexdigest() in str(book.prediction)
    assert len(str(book.prediction)) < 3000
    assert book.prediction == same.prediction != other.prediction


@pytest.mark.parametrize("does", ["returns", "raises", "exits"])
async def test_a_forked_child_that_comes_out_of_the_function_says_nothing(does: str) -> None:
    """The parent's score counts, once, and the samples after it are scored by the parent alone."""
    texts = ["a", "fork", *("x" * i for i in range(1, 40))]
    async with pool(hostile("forks")) as opened:
        results = await opened.score_responses(responses(*texts, does=does))
        again = await opened.score_responses(responses("fork", "bb", does=does))
    assert [r.score for r in results] == [float(len(text)) for text in texts]
    assert [r.score for r in again] == [4.0, 2.0]


async def test_a_child_forked_by_an_async_function_says_nothing() -> None:
    texts = ["a", "fork", "ccc", "fork"]
    async with pool(hostile("forks_async")) as opened:
        for _ in range(2):
            results = await opened.score_responses(responses(*texts))
            assert [r.score for r in results] == [float(len(text)) for text in texts]


async def test_a_child_in_a_session_of_its_own_holds_nothing_up() -> None:
    """It inherits the pipe and lives for a minute; the worker that forked it has ended at once."""
    began = time.monotonic()
    async with pool(hostile("forks"), onError="score") as opened:
        failed, fine = await opened.score_responses(responses("fork", "bb", does="stays"))
    assert "exit code 3" in str(failed.error)
    assert fine.score == 2.0
    assert time.monotonic() - began < 45


@pytest.mark.parametrize(
    ("does", "cause", "times"),
    [
        ("start", "no result within 2 s", 1),
        ("start and end", "exit code 3", 2),
        ("start late and end", "exit code 3", 2),
    ],
)
async def test_what_a_function_starts_in_a_session_of_its_own_ends_with_its_worker(
    tmp_path: Path, does: str, cause: str, times: int
) -> None:
    marker = tmp_path / "children"
    async with pool(hostile("starts_a_session"), timeoutSeconds=2) as opened:
        with pytest.raises(RewardError, match=cause):
            await opened.score_responses(responses(does, marker=str(marker)))
    children = [int(line) for line in marker.read_text().splitlines()]
    assert len(children) == times
    await until(lambda: not any(map(is_there, children)))


def is_there(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("close", "it closed or replaced file descriptors of its worker process"),
        ("write", "something wrote to the pipe of its worker process"),
        ("stop", "which the function sent itself"),
        ("alarm", "ended by signal SIGALRM; this happened twice"),
    ],
)
async def test_what_a_function_does_to_its_worker_is_its_own_fault_and_no_other_samples(what: str, cause: str) -> None:
    async with pool(hostile("disturbs"), timeoutSeconds=1, onError="score", errorScore=-1) as opened:
        results = await opened.score_responses(responses("a", what, "ccc", "dddd"))
    assert [r.score for r in results] == [1.0, -1.0, 3.0, 4.0]
    assert cause in str(results[1].error)


async def test_an_async_function_that_keeps_its_cancellation_to_itself_has_a_limit_too() -> None:
    async with pool(hostile("keeps_its_cancellation"), timeoutSeconds=1, onError="score", errorScore=-1) as opened:
        results = await opened.score_responses(responses("a", "keep", "ccc"))
        assert [r.score for r in results] == [1.0, -1.0, 3.0]
        assert "no result within 1 s" in str(results[1].error)
        assert [r.score for r in await opened.score_responses(responses("a", "bb"))] == [1.0, 2.0]


async def test_an_object_that_is_called_as_an_async_function_is_one() -> None:
    async with pool(hostile("judge")) as opened:
        assert [r.score for r in await opened.score_responses(responses("a", "bb"))] == [1.0, 2.0]


def test_an_error_of_ours_has_a_text_that_any_file_can_hold() -> None:
    assert str(RLJobError("prompt \ud83d")) == "prompt \\ud83d"
