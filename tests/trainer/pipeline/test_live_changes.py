"""Live changes of the schedule: every group keeps its age bound, nothing hangs, and new sizes come into force."""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from test_pipeline import World, pipeline_of, run_virtual

from rljob_trainer.pipeline.parts import StepRecord
from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings

CHANGES = st.lists(
    st.tuples(
        st.integers(1, 12),  # after this step
        st.one_of(st.none(), st.integers(0, 5)),  # maxAge
        st.one_of(st.none(), st.integers(1, 5)),  # pulls a version
    ),
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_age=st.integers(0, 5),
    pull=st.integers(1, 4),
    pulls=st.integers(1, 5),
    spread=st.sampled_from([0.1, 1.0, 2.5]),
    changes=CHANGES,
)
def test_every_prompt_is_trained_once_within_the_bound_it_was_admitted_under(
    seed: int, max_age: int, pull: int, pulls: int, spread: float, changes: list[tuple[int, int | None, int | None]]
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        world = World(rng, max([max_age, *(age for _, age, _ in changes if age is not None)]), spread)
        sizes: list[int] = []
        stepped = asyncio.Event()

        async def after_step(record: StepRecord) -> bool:
            sizes.append(len(record.groups))
            stepped.set()
            return True

        shape = ScheduleSettings(pull * pulls, pull, max_age, None, ordered=False)
        pipeline = pipeline_of(world, shape, 150, after_step=after_step)
        schedule = pipeline.schedule

        async def steer() -> None:
            wanted = shape
            for step, age, size in sorted(changes, key=lambda change: change[0]):
                while len(sizes) < step:
                    stepped.clear()
                    await stepped.wait()
                await asyncio.sleep(rng.random())
                wanted = replace(
                    wanted,
                    max_age=wanted.max_age if age is None else age,
                    groups_per_version=wanted.groups_per_version if size is None else size * pull,
                )
                schedule.change(wanted)

        steering = asyncio.create_task(steer())
        await pipeline.run()
        steering.cancel()
        assert sorted(world.trained) == list(range(150))
        assert {size % pull for size in sizes[:-1]} <= {0}

    run_virtual(main())


def test_a_smaller_version_waits_until_what_is_open_can_be_trained_in_time() -> None:
    schedule = Schedule(ScheduleSettings(8, 2, max_age=1, ordered=False))
    for ordinal in range(16):
        assert schedule.admissible(0) == 16 - ordinal
        schedule.admitted(ordinal, 0)
    assert schedule.admissible(0) == 0
    schedule.change(replace(schedule.settings, groups_per_version=2))
    sizes = []
    for _ in range(4):
        sizes.append(schedule.settings.groups_per_version)
        while not schedule.publication_due:
            for ordinal in range(100):
                if ordinal in schedule._deadlines and ordinal not in schedule._finished:
                    schedule.finished(ordinal)
            batch = schedule.choose(last=True)
            if batch is None:
                break
            schedule.trained(batch)
        schedule.published()
    # All 16 have the deadline 1, so versions 0 and 1 still train 8 each.
    assert sizes == [8, 8, 2, 2]


def test_a_change_of_mind_counts_and_a_bad_size_is_refused() -> None:
    schedule = Schedule(ScheduleSettings(2, 2, max_age=0, ordered=False))
    for size in (8, 4):
        schedule.change(replace(schedule.settings, groups_per_version=size))
    with pytest.raises(ValueError, match="not a multiple of the 4 groups of a pull"):
        schedule.change(ScheduleSettings(4, 4, max_age=0, ordered=False))
    schedule.published()
    assert schedule.settings.groups_per_version == 4
