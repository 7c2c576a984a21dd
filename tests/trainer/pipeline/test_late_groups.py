"""Which groups a batch cannot do without: against every batch that there could be, and in the loop itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_trainer.episodes.episode import Group, Prompt
from rljob_trainer.pipeline.loop import Pipeline
from rljob_trainer.pipeline.parts import NoJournal, StepRecord, TrainedBatch
from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings
from rljob_trainer.simulation.clock import run_virtual
from rljob_trainer.simulation.rollout import EndlessFeed
from rljob_trainer.waits import Waits

pytestmark = pytest.mark.integrity


def in_time(deadlines: Sequence[int], version: int, trained: int, size: int) -> bool:
    """#{open groups with deadline <= u} <= (G - c) + (u - v) G, for every u >= v."""
    return all(
        sum(deadline <= u for deadline in deadlines) <= (size - trained) + (u - version) * size
        for u in range(version, max([version, *deadlines]) + 1)
    )


def fewest_unfinished(schedule: Schedule, pull: int, size: int) -> int:
    """The least number of groups that are not finished in any batch after which the others can be trained in time."""
    deadlines, finished = schedule._deadlines, schedule._finished
    return min(
        sum(ordinal not in finished for ordinal in batch)
        for batch in combinations(deadlines, pull)
        if in_time(
            [deadlines[ordinal] for ordinal in deadlines if ordinal not in batch],
            schedule.version,
            schedule.trained_in_version + pull,
            size,
        )
    )


@settings(max_examples=150, deadline=None)
@given(pulls=st.integers(1, 3), pull=st.integers(1, 3), max_age=st.integers(0, 3), seed=st.integers(0, 2**32))
def test_a_batch_waits_for_as_few_as_the_bound_allows(pulls: int, pull: int, max_age: int, seed: int) -> None:
    size = pulls * pull
    schedule = Schedule(ScheduleSettings(size, pull, max_age, ordered=False))
    rng, ordinal = random.Random(seed), 0
    for _ in range(20):
        serving = max(0, schedule.version - rng.randint(0, 1))
        for _ in range(rng.randint(0, min(schedule.admissible(serving), 12 - schedule.open))):
            schedule.admitted(ordinal, serving)
            ordinal += 1
        running = [group for group in schedule._deadlines if group not in schedule._finished]
        for finished in rng.sample(running, rng.randint(0, len(running))):
            schedule.finished(finished)
        if schedule.waiting_finished < pull:
            assert schedule.late() == []
            continue
        late = schedule.late()
        assert len(late) == fewest_unfinished(schedule, pull, size)
        before, version, trained = dict(schedule._deadlines), schedule.version, schedule.trained_in_version
        batch = schedule.choose()
        assert (batch is None) == bool(late)
        if batch is None:
            for group in late:
                schedule.finished(group)
            batch = schedule.choose()
            assert batch is not None
            assert set(late) <= set(batch)
        left = [deadline for group, deadline in before.items() if group not in batch]
        assert in_time(left, version, trained + pull, size)
        schedule.trained(batch)
        if schedule.publication_due:
            schedule.published()


class Slow:
    """Prompts whose number is a multiple of ten take a hundred seconds, the others one; a publication is at once."""

    def __init__(self) -> None:
        self.serving_version, self.finished_at = 0, 0.0
        self.ended: list[int] = []
        self.cancelled: list[int] = []
        self.refuses = False
        self._over: dict[int, asyncio.Event] = {}

    async def run(self, prompt: Prompt) -> Group:
        over = self._over[prompt.ordinal] = asyncio.Event()
        try:
            async with asyncio.timeout(1 if prompt.ordinal % 10 else 100):
                await over.wait()
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self.cancelled.append(prompt.ordinal)
            raise
        return Group(prompt, [])

    async def end(self, ordinals: Sequence[int]) -> list[int]:
        if self.refuses:
            return list(ordinals)
        for ordinal in ordinals:
            self.ended.append(ordinal)
            self._over[ordinal].set()
        return []

    def waiting_for(self, finished: int, wanted: int) -> str:
        return "groups"

    async def train(self, groups: Sequence[Group], *, step: int, version: int) -> TrainedBatch:
        await asyncio.sleep(2.0)
        return TrainedBatch()

    async def publish(self, version: int) -> dict[str, float]:
        self.serving_version = version
        return {}


class Dropped(NoJournal):
    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}

    def dropped(self, group: Group, reason: str) -> None:
        self.reasons[group.prompt.ordinal] = reason


async def ten_steps(
    rollout: Slow,
    settings: ScheduleSettings,
    schedules: list[Schedule] | None = None,
    waits: Waits | None = None,
) -> tuple[float, list[int], Pipeline, Dropped]:
    """Virtual seconds, what was trained in order, and who knows more. The schedule is put into ``schedules``."""
    schedule = Schedule(settings)
    if schedules is not None:
        schedules.append(schedule)
    trained: list[int] = []

    async def after_step(record: StepRecord) -> bool:
        trained.extend(group.prompt.ordinal for group in record.groups)
        return record.step < 10

    journal = Dropped()
    pipeline = Pipeline(EndlessFeed(), rollout, rollout, schedule, after_step=after_step, waits=waits, journal=journal)
    await pipeline.run()
    return asyncio.get_running_loop().time(), trained, pipeline, journal


def test_training_waits_for_late_groups() -> None:
    seconds, trained, pipeline, journal = run_virtual(
        ten_steps(Slow(), ScheduleSettings(4, 4, max_age=2, ordered=False, on_deadline="wait"))
    )
    assert seconds > 200
    assert (0 in trained, pipeline.take_late(), journal.reasons) == (True, 0, {})


def test_late_groups_are_ended_and_trained() -> None:
    """The prompts 0 and 10 are admitted under version 0: they are trained in version 2, in the third step."""
    rollout = Slow()
    seconds, trained, pipeline, journal = run_virtual(
        ten_steps(rollout, ScheduleSettings(4, 4, max_age=2, ordered=False, on_deadline="end"))
    )
    assert seconds == pytest.approx(10 * 2 + 1)
    assert rollout.ended == [0, 10, 20, 30]
    assert {0, 10} <= set(trained[8:12])
    assert len(trained) == len(set(trained)) == 40
    assert (pipeline.take_late(), pipeline.take_late(), journal.reasons) == (4, 0, {})


async def told_while_it_waits() -> list[str]:
    """What is said of the wait for prompts 0 and 10, in the third step."""
    waits, said = Waits(), list[str]()

    async def look() -> None:
        await asyncio.sleep(30)
        assert waits.latest is not None
        said.append(waits.latest.reason())

    looking = asyncio.create_task(look())
    await ten_steps(Slow(), ScheduleSettings(4, 4, 2, ordered=False, on_deadline="wait"), waits=waits)
    await looking
    return said


def test_a_wait_for_late_groups_alone_says_so() -> None:
    assert run_virtual(told_while_it_waits()) == [
        "groups; only 2 late groups hold up the batch (pipeline.staleness.onDeadline: wait)"
    ]


async def patience_ends(settings: ScheduleSettings, at: float) -> tuple[float, list[int], Pipeline, Dropped]:
    """Training waits until somebody changes the running job."""
    rollout, schedules = Slow(), list[Schedule]()

    async def change() -> None:
        await asyncio.sleep(at)
        schedules[0].change(replace(settings, on_deadline="end"))

    changing = asyncio.create_task(change())
    result = await ten_steps(rollout, replace(settings, on_deadline="wait"), schedules)
    await changing
    return result


def test_a_live_change_ends_a_wait_at_once() -> None:
    seconds, trained, pipeline, _ = run_virtual(patience_ends(ScheduleSettings(4, 4, 2, ordered=False), 30.0))
    # Two steps are trained by then.
    assert seconds == pytest.approx(30 + 8 * 2)
    assert (len(set(trained)), pipeline.take_late()) == (40, 4)


DROPPED = [0, 10, 20, 30, 40]
"""With other prompts in the place of the first ones the tenth step is at prompt 44, not 40."""


def test_late_groups_are_dropped_and_others_come_in_their_place() -> None:
    rollout = Slow()
    seconds, trained, pipeline, journal = run_virtual(
        ten_steps(rollout, ScheduleSettings(4, 4, max_age=2, ordered=False, on_deadline="drop"))
    )
    assert seconds == pytest.approx(10 * 2 + 1)
    assert not set(DROPPED) & set(trained)
    assert len(trained) == len(set(trained)) == 40
    assert journal.reasons == dict.fromkeys(DROPPED, "deadline")
    assert set(rollout.cancelled) >= set(DROPPED)
    assert (pipeline.take_late(), pipeline.take_dropped().groups) == (5, 5)


def test_what_cannot_be_ended_is_dropped() -> None:
    rollout = Slow()
    rollout.refuses = True
    _, trained, _, journal = run_virtual(
        ten_steps(rollout, ScheduleSettings(4, 4, max_age=2, ordered=False, on_deadline="end"))
    )
    assert journal.reasons == dict.fromkeys(DROPPED, "deadline")
    assert not set(DROPPED) & set(trained)
