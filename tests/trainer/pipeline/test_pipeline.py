"""The one loop under virtual time: the age bound holds whatever the timing, nothing is lost, nothing hangs.

The real ``Pipeline`` and ``Schedule`` run on an event loop whose clock jumps to the next timer, with engines and a
trainer that only sleep. Ages are computed here from what the fake engines stamped on the tokens.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_episodes import an_episode

from rljob_trainer.episodes.episode import Group, Prompt
from rljob_trainer.errors import DataError, DeadlineError, EngineError, LearnerError, UnscoredError
from rljob_trainer.pipeline.loop import UNSCORED, Pipeline, apart_in_all, merge_pulls
from rljob_trainer.pipeline.parts import Apart, NoJournal, StepRecord, TrainedBatch
from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings
from rljob_trainer.pipeline.tally import Tally
from rljob_trainer.telemetry.catalogue import METRICS


class VirtualSelector(selectors.SelectSelector):
    """Instead of sleeping until the next timer, moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: nothing is scheduled and nothing is ready")
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual = VirtualSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


def run_virtual(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)


class Feed:
    def __init__(self, prompts: int) -> None:
        self.left = prompts
        self.ordinal = 0

    async def prepare(self, prompts: int) -> bool:
        return True

    def next(self) -> Prompt | None:
        if self.left == 0:
            return None
        self.left -= 1
        self.ordinal += 1
        return Prompt(self.ordinal - 1, 0, self.ordinal - 1, "test", "", (1,), None)

    def state_dict(self) -> dict[str, object]:
        return {"ordinal": self.ordinal}


class World:
    """Engines that sleep and stamp versions, and a trainer that sleeps and checks ages."""

    def __init__(self, rng: random.Random, max_age: int, spread: float) -> None:
        self.rng, self.max_age, self.spread = rng, max_age, spread
        self.serving_version = 0
        self.trained: list[int] = []
        self.ages: list[int] = []
        self.running = 0
        self.idle = asyncio.Event()
        self.finished_at = 0.0

    async def run(self, prompt: Prompt) -> Group:
        self.running += 1
        version = self.serving_version
        await asyncio.sleep(self.rng.lognormvariate(0, self.spread))
        self.running -= 1
        self.finished_at = asyncio.get_running_loop().time()
        if not self.running:
            self.idle.set()
        return Group(prompt, [an_episode(prompt, 0, [version])])

    def waiting_for(self, finished: int, wanted: int) -> str:
        return f"{finished}/{wanted} groups; {self.running} are running"

    async def train(self, groups: Sequence[Group], *, step: int, version: int) -> TrainedBatch:
        for group in groups:
            age = version - group.oldest_version
            assert 0 <= age <= self.max_age, f"age {age} of {group.prompt.ordinal} at version {version}"
            self.ages.append(age)
            self.trained.append(group.prompt.ordinal)
        await asyncio.sleep(self.rng.lognormvariate(0, self.spread))
        return TrainedBatch()

    async def publish(self, version: int) -> dict[str, float]:
        # Without interruption a publication waits for what is running.
        while self.running:
            self.idle.clear()
            await self.idle.wait()
        self.serving_version = version
        return {}


async def go_on(record: StepRecord) -> bool:
    return True


def pipeline_of(world: World, settings_: ScheduleSettings, prompts: int, **arguments: Any) -> Pipeline:
    options = {"after_step": go_on, "sample_deadline_seconds": 1e12, **arguments}  # the tail of response times is heavy
    return Pipeline(Feed(prompts), world, world, Schedule(settings_), **options)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_age=st.integers(0, 8),
    pull=st.integers(1, 6),
    pulls=st.integers(1, 4),
    spread=st.sampled_from([0.1, 1.0, 2.5]),
    fraction=st.sampled_from([None, 0.0, 0.5]),
    prompts=st.integers(1, 120),
    ordered=st.booleans(),
)
def test_every_prompt_is_trained_once_within_the_age_bound(
    seed: int, max_age: int, pull: int, pulls: int, spread: float, fraction: float | None, prompts: int, ordered: bool
) -> None:
    async def main() -> None:
        world = World(random.Random(seed), max_age, spread)
        shape = ScheduleSettings(pull * pulls, pull, max_age, fraction, ordered)
        await pipeline_of(world, shape, prompts).run()
        assert sorted(world.trained) == list(range(prompts))

    run_virtual(main())


def test_sync_trains_only_on_its_own_version_in_the_order_of_the_feed() -> None:
    async def main() -> None:
        world = World(random.Random(1), 0, 1.0)
        await pipeline_of(world, ScheduleSettings(4, 4, 0), 20).run()
        assert world.ages == [0] * 20
        assert world.trained == list(range(20))

    run_virtual(main())


@pytest.mark.parametrize(("pull", "batches"), [(4, [[0, 1, 2, 3]]), (2, [[0, 2], [1, 3]])])
def test_who_came_first_is_taken_first_but_a_batch_has_the_order_of_the_feed(
    pull: int, batches: list[list[int]]
) -> None:
    schedule = Schedule(ScheduleSettings(4, pull, 0, ordered=False))
    for ordinal in range(4):
        schedule.admitted(ordinal, 0)
    for ordinal in (2, 0, 3, 1):
        schedule.finished(ordinal)
    chosen = []
    while batch := schedule.choose():
        schedule.trained(batch)
        chosen.append(batch)
    assert chosen == batches


def test_one_step_off_is_exactly_one_version_old_after_the_first_batch() -> None:
    async def main() -> None:
        world = World(random.Random(2), 1, 1.0)
        await pipeline_of(world, ScheduleSettings(4, 4, 1), 40).run()
        assert world.ages == [0] * 4 + [1] * 36

    run_virtual(main())


def test_asynchronous_training_is_really_stale_when_the_trainer_is_slow() -> None:
    async def main() -> None:
        world = World(random.Random(3), 4, 0.5)
        await pipeline_of(world, ScheduleSettings(4, 4, 4, None, ordered=False), 400).run()
        assert np.mean(world.ages[100:]) >= 2

    run_virtual(main())


def test_a_last_short_batch_is_trained() -> None:
    async def main() -> None:
        world = World(random.Random(4), 0, 1.0)
        records: list[StepRecord] = []

        async def record(step: StepRecord) -> bool:
            records.append(step)
            return True

        await pipeline_of(world, ScheduleSettings(4, 4, 0), 10, after_step=record).run()
        assert [len(r.groups) for r in records] == [4, 4, 2]
        assert [r.step for r in records] == [1, 2, 3]

    run_virtual(main())


def test_filtered_groups_are_replaced_through_the_feed_and_counted() -> None:
    async def main() -> None:
        world = World(random.Random(5), 0, 1.0)
        pipeline = pipeline_of(
            world, ScheduleSettings(4, 4, 0), 30, keep=lambda g: "no signal" if g.prompt.ordinal % 3 == 0 else None
        )
        await pipeline.run()
        assert world.trained == [o for o in range(30) if o % 3]
        # Each has one sample of one token, which nobody has scored.
        assert pipeline.take_dropped() == Tally(groups=10, samples=10, tokens=10)
        assert pipeline.take_dropped() == Tally()

    run_virtual(main())


def test_a_filter_that_keeps_nothing_ends_in_an_error() -> None:
    async def main() -> None:
        world = World(random.Random(6), 0, 1.0)
        pipeline = pipeline_of(world, ScheduleSettings(4, 4, 0), 1000, keep=lambda g: "no signal", most_dropped=50)
        await pipeline.run()

    with pytest.raises(DataError, match="50 prompt groups were dropped before a batch was full"):
        run_virtual(main())


class Unscored(World):
    """A world in which one prompt in three has no reward."""

    every = 3

    async def run(self, prompt: Prompt) -> Group:
        group = await super().run(prompt)
        if prompt.ordinal % self.every == 0:
            raise UnscoredError(f"no score for prompt {prompt.ordinal}", 65)
        return group


def test_a_group_without_a_reward_is_replaced_and_its_reason_is_on_record() -> None:
    class Noted(NoJournal):
        def __init__(self) -> None:
            self.left_out: list[tuple[int, str]] = []

        def dropped(self, group: Group, reason: str) -> None:
            self.left_out.append((group.prompt.ordinal, reason))

    async def main() -> None:
        world, journal = Unscored(random.Random(6), 0, 1.0), Noted()
        pipeline = pipeline_of(world, ScheduleSettings(4, 4, 0), 30, journal=journal)
        await pipeline.run()
        assert world.trained == [o for o in range(30) if o % 3]
        assert sorted(journal.left_out) == [(ordinal, UNSCORED) for ordinal in range(0, 30, 3)]
        # What they had said is not known any more.
        assert pipeline.take_dropped() == Tally(groups=10)

    run_virtual(main())


def test_a_reward_that_is_never_there_ends_the_run_as_what_failed_does() -> None:
    class Never(Unscored):
        every = 1

    async def main() -> None:
        await pipeline_of(Never(random.Random(6), 0, 1.0), ScheduleSettings(4, 4, 0), 1000, most_dropped=50).run()

    with pytest.raises(UnscoredError, match=r"50 prompt groups were dropped .* no score for prompt \d+") as ended:
        run_virtual(main())
    assert ended.value.exit_code == 65


def test_an_error_of_a_part_ends_the_run_with_that_error() -> None:
    class Broken(World):
        async def run(self, prompt: Prompt) -> Group:
            if prompt.ordinal == 5:
                raise DataError("row 5 is bad") from OSError("the disk is full")
            return await super().run(prompt)

    async def main() -> None:
        await pipeline_of(Broken(random.Random(7), 0, 1.0), ScheduleSettings(4, 4, 0), 20).run()

    with pytest.raises(DataError, match="row 5 is bad") as raised:
        run_virtual(main())
    assert isinstance(raised.value.__cause__, OSError)


def test_what_groups_raise_while_they_are_cancelled_hides_no_error_of_the_trainer() -> None:
    class Ending(World):
        async def run(self, prompt: Prompt) -> Group:
            try:
                return await super().run(prompt)
            except asyncio.CancelledError:
                raise EngineError("engine 0 is gone, too") from None

        async def train(self, groups: Sequence[Group], *, step: int, version: int) -> TrainedBatch:
            raise LearnerError("rank 0 is gone")

    async def main() -> None:
        await pipeline_of(Ending(random.Random(7), 2, 1.0), ScheduleSettings(4, 4, 2, ordered=False), 20).run()

    with pytest.raises(LearnerError, match="rank 0 is gone"):
        run_virtual(main())


def test_data_that_never_come_end_in_an_error_that_says_where_they_lie() -> None:
    async def main() -> None:
        pipeline = pipeline_of(
            World(random.Random(9), 0, 1.0), ScheduleSettings(4, 4, 0), 20, sample_deadline_seconds=60
        )
        await pipeline.read(asyncio.Event().wait())

    with pytest.raises(DeadlineError, match=r"took longer than 60 s.*storage with spec\.data\.train answers"):
        run_virtual(main())


def test_prompts_in_the_place_of_dropped_ones_that_never_come_are_no_fault_of_the_engines() -> None:
    class Silent(Feed):
        async def prepare(self, prompts: int) -> bool:
            if self.ordinal == 4:
                await asyncio.Event().wait()
            return True

    async def main() -> None:
        world = World(random.Random(9), 0, 1.0)
        options: dict[str, Any] = {"keep": lambda group: "no signal", "sample_deadline_seconds": 60}
        pipeline = pipeline_of(world, ScheduleSettings(4, 4, 0), 20, **options)
        pipeline.feed = Silent(20)
        await pipeline.run()

    with pytest.raises(DeadlineError, match=r"took longer than 60 s.*storage with spec\.data\.train answers"):
        run_virtual(main())


def test_samples_that_never_come_end_in_an_error_that_says_who_was_waited_for() -> None:
    class Stuck(World):
        async def run(self, prompt: Prompt) -> Group:
            self.running += 1
            await asyncio.sleep(1e9)
            raise AssertionError

    async def main() -> None:
        await pipeline_of(
            Stuck(random.Random(8), 0, 1.0), ScheduleSettings(4, 4, 0), 20, sample_deadline_seconds=60
        ).run()

    with pytest.raises(
        DeadlineError, match=r"trainer waits for 0/4 groups; 4 are running.*No sample was finished within 60 s"
    ):
        run_virtual(main())


def test_metrics_of_several_pulls_are_reduced_as_the_catalogue_says() -> None:
    first = {"timing/update_seconds": 1.0, "reward/mean": 0.0, "actor/grad_norm/max": 5.0, "actor/learning_rate": 1.0}
    second = {"timing/update_seconds": 2.0, "reward/mean": 1.0, "actor/grad_norm/max": 4.0, "actor/learning_rate": 0.5}
    assert merge_pulls([first, second]) == {
        "timing/update_seconds": 3.0,
        "reward/mean": 0.5,
        "actor/grad_norm/max": 5.0,
        "actor/learning_rate": 0.5,
    }


def test_limits_judge_the_mean_of_a_step_s_pulls_and_those_with_older_tokens_alone() -> None:
    fresh = [Apart("mismatch", kl, 2 * kl, 1.0 - kl) for kl in (0.1, 0.3)]
    assert apart_in_all([]) is None
    both = apart_in_all(fresh)
    assert both is not None
    assert (both.family, both.kl, both.chi_square, both.effective_sample_size) == ("mismatch", 0.2, 0.4, 0.8)
    older = Apart("drift", 5.0, 6.0, 0.5, "sample 1 of prompt 2 by 5 nats")
    assert apart_in_all([*fresh, older]) == older


def test_the_slowest_episode_of_a_step_is_one_episode() -> None:
    family = "agent_loop/slowest"
    thinks = {f"{family}/generate_sequences": 5.0, f"{family}/tool_calls": 0.5, f"{family}/response_length": 90.0}
    calls = {f"{family}/generate_sequences": 1.0, f"{family}/tool_calls": 9.0, f"{family}/response_length": 10.0}
    plain = {"rollout/slowest/seconds": 100.0}
    for pulls in ([thinks, calls, plain], [plain, calls, thinks]):
        assert merge_pulls(pulls) == calls | plain


def test_extremes_of_several_pulls_are_extremes_of_the_step() -> None:
    first = {"age/mean": 4.0, "age/max": 4.0, "age/min": 4.0, "response/length/max": 90.0, "reward/min": -1.0}
    second = {"age/mean": 0.0, "age/max": 0.0, "age/min": 0.0, "response/length/max": 100.0, "reward/min": 0.5}
    slow = {"rollout/slowest/seconds": 9.0, "rollout/slowest/response_length": 90.0}
    fast = {"rollout/slowest/seconds": 2.0, "rollout/slowest/response_length": 100.0}
    for pulls in ([first | slow, second | fast], [second | fast, first | slow]):
        assert (
            merge_pulls(pulls)
            == {
                "age/mean": 2.0,
                "age/max": 4.0,
                "age/min": 0.0,
                "response/length/max": 100.0,
                "reward/min": -1.0,
            }
            | slow
        )


def test_no_metric_with_an_extreme_in_its_name_is_averaged_over_pulls() -> None:
    extremes = [m for m in METRICS if m.name.rpartition("/")[2] in ("min", "max") and m.reduction == "batch"]
    # One publication a version, so there is one value a step.
    assert [m.name for m in extremes] == ["mismatch/canary/max"]
