"""How many prompts may start: against the inequality of the schedule's docstring, tried prompt by prompt."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings


def in_time(deadlines: list[int], version: int, trained: int, size: int) -> bool:
    """#{open groups with deadline <= u} <= (G - c) + (u - v) G, for every u >= v."""
    return all(
        sum(deadline <= u for deadline in deadlines) <= (size - trained) + (u - version) * size
        for u in range(version, max([version, *deadlines]) + 1)
    )


@settings(max_examples=200, deadline=None)
@given(
    pulls=st.integers(1, 4),
    pull=st.integers(1, 3),
    max_age=st.integers(0, 4),
    fraction=st.none() | st.sampled_from([0.0, 0.1, 0.5, 0.7, 2.0]),
    seed=st.integers(0, 2**32),
)
def test_as_many_as_the_bound_and_the_budget_leave(
    pulls: int, pull: int, max_age: int, fraction: float | None, seed: int
) -> None:
    size = pulls * pull
    schedule, rng, ordinal = (
        Schedule(ScheduleSettings(size, pull, max_age, fraction, ordered=False)),
        random.Random(seed),
        0,
    )
    for _ in range(60):
        # An engine may still serve the version before.
        serving = max(0, schedule.version - rng.randint(0, 1))
        deadlines = list(schedule._deadlines.values())
        possible = 0
        while in_time([*deadlines, serving + max_age], schedule.version, schedule.trained_in_version, size) and (
            fraction is None or len(deadlines) + 1 + schedule.trained_in_version <= (1 + fraction) * size
        ):
            deadlines.append(serving + max_age)
            possible += 1
        assert schedule.admissible(serving) == possible
        for _ in range(rng.randint(0, possible)):
            schedule.admitted(ordinal, serving)
            ordinal += 1
        running = [open_ for open_ in schedule._deadlines if open_ not in schedule._finished]
        for finished in rng.sample(running, rng.randint(0, len(running))):
            schedule.finished(finished)
        while not schedule.publication_due and (batch := schedule.choose()):
            schedule.trained(batch)
        if schedule.publication_due:
            schedule.published()
