"""Reward models on replicas that are played: shares, losses, sizes, and what is said of who waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rljob_api.spec.reward_model import RewardModelSpec
from rljob_trainer.errors import JobFileError, RewardWorkerError
from rljob_trainer.models.fixed import FixedModel
from rljob_trainer.rewards.reward_model import scorers as module
from rljob_trainer.rewards.reward_model.replica import ScoredBatch, ScorerLostError
from rljob_trainer.rewards.reward_model.rows import RowQueue
from rljob_trainer.rewards.reward_model.scorers import ReplicaSupply, Scorers
from rljob_trainer.rewards.reward_model.served import ServedModel
from rljob_trainer.rewards.terms import RewardFailure
from rljob_trainer.waits import Waits

SECONDS = 20


def model(name: str = "m") -> ServedModel:
    files = FixedModel("field", "somewhere", None, Path(), "version")
    return ServedModel(name, RewardModelSpec(source="somewhere"), files)


def row(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class PlayedReplica:
    """Scores a row by its length, when it may."""

    def __init__(self, pod: str, *, free: bool) -> None:
        self.pod: str | None = pod
        self.may = asyncio.Event()
        if free:
            self.may.set()
        self.dead = asyncio.get_running_loop().create_future()
        self.batches: list[list[str]] = []
        self.killed = False
        self.fails_on: str | None = None

    async def scores(self, model: ServedModel, rows: Sequence[Any]) -> ScoredBatch:
        if not rows:
            return ScoredBatch((), 0, 0.0)
        texts = [messages[-1]["content"] for messages in rows]
        self.batches.append(texts)
        may = asyncio.create_task(self.may.wait())
        await asyncio.wait({may, self.dead}, return_when=asyncio.FIRST_COMPLETED)
        may.cancel()
        if self.dead.done():
            raise ScorerLostError("killed")
        if self.fails_on in texts:
            raise ZeroDivisionError("by nothing")
        return ScoredBatch([float(len(text)) for text in texts], sum(map(len, texts)), 0.0)

    async def ended(self) -> str:
        return str(await asyncio.shield(self.dead))

    async def kill(self) -> None:
        self.killed = True

    def die(self) -> None:
        self.dead.set_result("killed")


class Stage:
    """Starts replicas in pods of their numbers, and remembers them."""

    def __init__(self, *, free: bool) -> None:
        self.free = free
        self.replicas: list[PlayedReplica] = []
        self.problem: Exception | None = None
        self.tries = 0
        self.open = asyncio.Event()
        """Until it is set, replicas are on their way."""
        self.open.set()
        self.pod: str | None = None
        """Of all further ones; None: each has its own."""

    async def start(self, name: str) -> PlayedReplica:
        self.tries += 1
        await self.open.wait()
        if self.problem is not None:
            raise self.problem
        self.replicas.append(PlayedReplica(self.pod or f"pod-{name}", free=self.free))
        return self.replicas[-1]

    async def some(self, count: int) -> None:
        """Until so many have been started in all."""
        await until(lambda: len(self.replicas) >= count)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.01)


@asynccontextmanager
async def opened(
    stage: Stage, count: int, waits: Waits | None = None, patience: float = SECONDS
) -> AsyncIterator[Scorers]:
    scorers = Scorers(count, ReplicaSupply(stage.start, "the pool", "mend it", patience), waits)
    try:
        async with asyncio.timeout(SECONDS):
            await scorers.serve(model())
            await until(lambda: sum(s.state == "serving" for s in scorers.standings()) == count)
            yield scorers
    finally:
        await scorers.close()


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.02)


async def test_each_taker_gets_about_as_many_characters() -> None:
    """By hand, with 64 characters around each row: 936 + 64 of 2,000 are half of all."""
    queue = RowQueue(lambda: None)
    for text in ["a" * 936, *["b" * 36] * 10]:
        queue.put("m", row(text))
    first, second, third = queue.take(2), queue.take(1), queue.take(1)
    assert first is not None
    assert second is not None
    assert [len(waiting.row[-1]["content"]) for waiting in first.rows] == [936]
    assert [len(waiting.row[-1]["content"]) for waiting in second.rows] == [36] * 10
    assert third is None


async def test_a_batch_is_of_one_model_and_has_an_end() -> None:
    queue = RowQueue(lambda: None)
    for index in range(1000):
        queue.put("first" if index < 600 else "second", row("a"))
    sizes = []
    while (batch := queue.take(1)) is not None:
        sizes.append((batch.model, len(batch.rows)))
    assert sizes == [("first", 512), ("first", 88), ("second", 400)]
    # 65,536 characters in one batch at most: 65 rows of 1,000, and those of the template around each.
    for _ in range(100):
        queue.put("long", row("a" * 936))
    batch = queue.take(1)
    assert batch is not None
    assert len(batch.rows) == 65


async def test_rows_that_nobody_wants_any_more_are_not_scored() -> None:
    stage = Stage(free=False)
    async with opened(stage, 1) as scorers:
        first = asyncio.create_task(scorers.score("m", row("a")))
        await until(lambda: bool(stage.replicas[0].batches))
        second, third = (asyncio.create_task(scorers.score("m", row(text))) for text in ("bb", "ccc"))
        await until(lambda: scorers.waiting == 2)
        second.cancel()
        stage.replicas[0].may.set()
        assert [await first, await third] == [1.0, 3.0]
        assert stage.replicas[0].batches == [["a"], ["ccc"]]


async def test_what_a_lost_replica_had_is_scored_by_another() -> None:
    stage = Stage(free=False)
    async with opened(stage, 2) as scorers:
        asked = [asyncio.create_task(scorers.score("m", row("a" * length))) for length in range(1, 7)]
        await until(lambda: all(replica.batches for replica in stage.replicas))
        lost, other = stage.replicas
        had = lost.batches[0]
        lost.die()
        await stage.some(3)
        assert lost.killed
        other.may.set()
        stage.replicas[2].may.set()
        assert await asyncio.gather(*asked) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        again = [text for replica in (other, stage.replicas[2]) for batch in replica.batches for text in batch]
        assert set(had) <= set(again)
        assert scorers.take_counts("m").losses == 1


async def test_a_row_whose_replica_is_lost_three_times_has_no_score() -> None:
    stage = Stage(free=False)
    async with opened(stage, 1) as scorers:
        asked = asyncio.create_task(scorers.score("m", row("a")))
        for number in range(3):
            await stage.some(number + 1)
            await until(lambda number=number: bool(stage.replicas[number].batches))  # type: ignore[misc]
            stage.replicas[number].die()
        said = await asked
        assert isinstance(said, RewardFailure)
        assert said.lost
        assert said.problem == "the process of the reward model was lost 3 times: killed; mend it"


async def test_a_row_on_which_the_model_raises_is_the_only_one_without_a_score(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(free=True)
    async with opened(stage, 1) as scorers:
        replica = stage.replicas[0]
        replica.fails_on = "bb"
        async with asyncio.timeout(SECONDS):
            said = await asyncio.gather(*(scorers.score("m", row(text)) for text in ("a", "bb", "ccc")))
            assert await scorers.score("m", row("dddd")) == 4.0
        assert (said[0], said[2]) == (1.0, 3.0)
        assert isinstance(said[1], RewardFailure)
        assert said[1].problem.startswith("the reward model fails on it: ZeroDivisionError: by nothing")
        assert not said[1].lost
        # All of them share the first batch; then each is alone.
        assert replica.batches == [["a", "bb", "ccc"], ["a"], ["bb"], ["ccc"], ["dddd"]]
        assert len(stage.replicas) == 1
    assert "replica 0 of the pool on pod-0 failed on 3 samples" in caplog.text


async def test_some_replicas_come_up_at_a_time() -> None:
    stage = Stage(free=True)
    async with opened(stage, 1) as scorers:
        stage.open.clear()
        scorers.want(20)
        await until(lambda: stage.tries > 1)
        await asyncio.sleep(0.1)  # several looks
        assert [s.state for s in scorers.standings()] == ["serving"] + ["starting"] * 16
        stage.open.set()
        await until(lambda: [s.state for s in scorers.standings()] == ["serving"] * 20)
        assert stage.tries == 20


async def test_a_replica_that_dies_with_nothing_in_hand_is_replaced() -> None:
    stage = Stage(free=True)
    async with opened(stage, 1) as scorers:
        stage.replicas[0].die()
        await stage.some(2)
        assert await scorers.score("m", row("abc")) == 3.0
        assert scorers.take_counts("m").losses == 0


async def test_a_surplus_replica_finishes_before_its_pod_may_go() -> None:
    stage = Stage(free=False)
    async with opened(stage, 2) as scorers:
        asked = [asyncio.create_task(scorers.score("m", row("a" * length))) for length in (1, 1)]
        await until(lambda: all(replica.batches for replica in stage.replicas))
        scorers.want(1)
        await until(lambda: [s.state for s in scorers.standings()] == ["serving", "leaving"])
        assert scorers.drained == []
        stage.replicas[1].may.set()
        await until(lambda: bool(scorers.drained))
        assert [(gone.name, gone.pod) for gone in scorers.drained] == [("1", "pod-1")]
        assert (stage.replicas[0].killed, stage.replicas[1].killed) == (False, True)
        stage.replicas[0].may.set()
        assert await asyncio.gather(*asked) == [1.0, 1.0]
        # Another one that comes to the same pod is no reason to remove it.
        stage.pod = "pod-1"
        scorers.want(2)
        await until(lambda: len(scorers.standings()) == 2 and scorers.drained == [])


async def test_who_waits_for_what_is_said() -> None:
    stage, waits = Stage(free=False), Waits()
    async with opened(stage, 1, waits) as scorers:
        assert waits.beside == {}
        first = asyncio.create_task(scorers.score("m", row("a")))
        await until(lambda: bool(stage.replicas[0].batches))
        others = [asyncio.create_task(scorers.score("m", row("a"))) for _ in range(2)]
        await until(lambda: scorers.waiting == 2)
        (wait,) = waits.beside.values()
        assert wait.sentence.startswith("the pool waits for 1 of 1 replicas to score 1 samples, oldest")
        assert wait.sentence.endswith("s; 2 more in the queue")
        assert waits.left(wait) is None
        stage.problem = RewardWorkerError("no room")
        stage.replicas[0].die()
        await until(lambda: "no room" in wait.sentence)
        assert wait.sentence == (
            "the pool waits for replicas: 0 of 1 are up; 3 more in the queue; the last one failed to start: no room"
        )
        assert waits.left(wait) is not None
        stage.problem = None
        stage.free = True
        assert await asyncio.gather(first, *others) == [1.0] * 3
        assert waits.beside == {}
        assert scorers.take_counts("m").most == 2


@pytest.mark.parametrize("problem", [RewardWorkerError("no room"), ValueError("of Ray")])
async def test_a_replica_that_does_not_come_up_is_tried_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", float("inf"))
    stage = Stage(free=True)
    stage.problem = problem
    with pytest.raises(RewardWorkerError, match="no replica of the reward models starts"):
        async with opened(stage, 1, patience=0.2):
            pass
    assert stage.tries == 1


@pytest.mark.parametrize(
    ("problem", "patience", "expected"),
    [
        (JobFileError("no head"), SECONDS, r"^no head$"),
        (RewardWorkerError("no room"), 0.1, r"^no replica of the reward models starts: no room; mend it$"),
        (ValueError("of Ray"), 0.1, r"^no replica of the reward models starts: ValueError: of Ray .*; mend it$"),
    ],
    ids=["what is no reward model is said at once", "what may change is waited for", "what nobody thought of"],
)
async def test_when_no_replica_comes_up(problem: Exception, patience: float, expected: str) -> None:
    kind = JobFileError if isinstance(problem, JobFileError) else RewardWorkerError
    stage = Stage(free=True)
    stage.problem = problem
    with pytest.raises(kind, match=expected):
        async with opened(stage, 2, patience=patience):
            pass
    stage.problem = None
    async with opened(stage, 1, patience=patience) as scorers:
        stage.problem = problem
        stage.replicas[-1].die()
        with pytest.raises(kind, match=expected):
            await scorers.score("m", row("a"))
