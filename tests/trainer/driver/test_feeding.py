"""The feed of a run reads beside the event loop, hands out the same prompts, and forgets what it only looked at."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from small_episodes import an_episode

from rljob_trainer.driver.feeding import RunFeed
from rljob_trainer.episodes.episode import Group, Prompt
from rljob_trainer.errors import DataError, DeadlineError
from rljob_trainer.pipeline.loop import Pipeline
from rljob_trainer.pipeline.parts import StepRecord, TrainedBatch
from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings


class Storage:
    """Rows behind a file server, which answers while ``answers`` is set and fails at the row ``bad``."""

    def __init__(self, rows: int, bad: int | None = None) -> None:
        self.rows, self.bad = rows, bad
        self.position = 0
        self.answers = threading.Event()
        self.answers.set()

    def next(self) -> Prompt | None:
        assert self.answers.wait(3)
        if self.position == self.bad:
            raise DataError(f"row {self.bad} is bad")
        if self.position == self.rows:
            return None
        self.position += 1
        return Prompt(self.position - 1, 0, self.position - 1, "s", "", (1,), None)

    def state_dict(self) -> dict[str, Any]:
        assert self.answers.wait(3)
        return {"position": self.position}


async def taken(feed: RunFeed, prompts: int) -> list[int | None]:
    while not await feed.prepare(prompts):
        pass
    handed_out = [feed.next() for _ in range(prompts)]
    return [prompt and prompt.row for prompt in handed_out]


async def test_the_event_loop_goes_on_while_storage_does_not_answer() -> None:
    storage = Storage(10)
    feed = RunFeed(storage)
    storage.answers.clear()
    for waiting in (feed.begin(), taken(feed, 3), feed.exhausted()):
        task = asyncio.create_task(waiting)
        await asyncio.sleep(0.05)  # which would not end if storage were waited for here
        assert not task.done()
        storage.answers.set()
        assert await task in (None, [0, 1, 2], False)
        storage.answers.clear()


async def test_prompts_that_are_at_hand_are_handed_out_without_a_wait() -> None:
    feed = RunFeed(Storage(10))
    assert not await feed.prepare(4)
    assert await feed.prepare(4)
    assert await feed.prepare(0)
    assert [feed.next() for _ in range(4)] != [None] * 4
    assert not await feed.prepare(1)


async def test_prompts_come_in_their_order_to_several_who_wait() -> None:
    feed = RunFeed(Storage(50))
    both = await asyncio.gather(taken(feed, 20), taken(feed, 25))
    assert both == [list(range(20)), list(range(20, 45))]
    assert await taken(feed, 7) == [45, 46, 47, 48, 49, None, None]
    assert await feed.exhausted()


async def test_what_was_read_ahead_does_not_show_in_the_state() -> None:
    storage = Storage(3)
    feed = RunFeed(storage)
    assert feed.state_dict() == {"position": 0}
    await feed.prepare(3)
    assert (feed.state_dict(), storage.position) == ({"position": 0}, 3)
    assert await taken(feed, 2) == [0, 1]
    assert not await feed.exhausted()
    assert feed.state_dict() == {"position": 2}
    assert await taken(feed, 2) == [2, None]
    assert await feed.exhausted()
    assert feed.state_dict() == {"position": 3}


async def test_what_is_wrong_with_the_data_is_raised_each_time() -> None:
    feed = RunFeed(Storage(10, bad=2))
    assert await taken(feed, 1) == [0]
    for _ in range(2):
        with pytest.raises(DataError, match="row 2 is bad"):
            await feed.prepare(5)
    assert feed.state_dict() == {"position": 1}


class World:
    """Engines and a trainer that take no time; keeps when each prompt was begun, in turns of the event loop."""

    serving_version = 0
    finished_at = 0.0

    def __init__(self) -> None:
        self.turn = 0
        self.begun: dict[int, int] = {}

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    async def run(self, prompt: Prompt) -> Group:
        self.begun[prompt.row] = self.turn
        return Group(prompt, [an_episode(prompt, 0, [self.serving_version])])

    def waiting_for(self, finished: int, wanted: int) -> str:
        return "samples"

    async def train(self, groups: Sequence[Group], *, step: int, version: int) -> TrainedBatch:
        return TrainedBatch()

    async def publish(self, version: int) -> dict[str, float]:
        self.serving_version = version
        return {}


async def one_step(record: StepRecord) -> bool:
    return False


async def test_a_run_goes_on_while_storage_does_not_answer_and_begins_its_prompts_together() -> None:
    """The prompts that an earlier process left open too: they enter the engines in one go."""
    storage, world = Storage(10), World()
    schedule = Schedule(ScheduleSettings(groups_per_version=4, groups_per_pull=4, max_age=0))
    left = Prompt(9, 0, 9, "s", "", (1,), None)
    schedule.restored(9, 0)
    pipeline = Pipeline(RunFeed(storage), world, world, schedule, after_step=one_step, restored=[left])
    storage.answers.clear()
    turns, running = asyncio.create_task(world.count_turns()), asyncio.create_task(pipeline.run())
    await asyncio.sleep(0.05)
    assert world.begun == {}
    storage.answers.set()
    await running
    turns.cancel()
    assert world.turn > 10
    assert list(world.begun) == [9, 0, 1, 2]
    assert len(set(world.begun.values())) == 1


async def test_storage_that_never_answers_ends_a_run_at_its_deadline() -> None:
    storage, world = Storage(10), World()
    schedule = Schedule(ScheduleSettings(groups_per_version=4, groups_per_pull=4, max_age=0))
    pipeline = Pipeline(RunFeed(storage), world, world, schedule, after_step=one_step, sample_deadline_seconds=0.1)
    storage.answers.clear()
    with pytest.raises(DeadlineError, match=r"reading the next prompts took longer than 0 s .*spec.data.train"):
        await pipeline.run()
    storage.answers.set()
