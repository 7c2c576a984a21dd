"""Forecasts where the answer is known: equal lengths, one engine, and the arithmetic of each pipeline."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rljob_api.spec.pipeline import OnDeadline
from rljob_trainer.pipeline.schedule import ScheduleSettings
from rljob_trainer.simulation.clock import DeadlockError, run_virtual
from rljob_trainer.simulation.engine import DecodeSpeed
from rljob_trainer.simulation.forecast import Forecast, ForecastSetup, simulate
from rljob_trainer.simulation.lengths import Lengths, LogNormal, ToolLatency
from rljob_trainer.simulation.rollout import TrainerSpeed


class Always:
    """All responses are equally long."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def draw(self, rng: np.random.Generator, groups: int, n: int) -> Lengths:
        return np.full((groups, n), self.tokens, np.int64)

    def describe(self) -> str:
        return f"always {self.tokens}"


def setup(
    schedule: ScheduleSettings, *, training: float, publication: float = 0.0, partial: str = "none"
) -> ForecastSetup:
    """4 groups of 2 x 100 tokens on two engines: 4 sequences each, 0.02 s a token, so a batch alone takes 2 s."""
    return ForecastSetup(
        schedule=schedule,
        partial_rollout=partial,  # type: ignore[arg-type]
        samples_per_prompt=2,
        lengths=Always(100),
        engines=[DecodeSpeed(0.01, 4)] * 2,
        max_concurrent=16,
        trainer=TrainerSpeed(training / 800, publication_seconds=publication),
    )


def test_sync_takes_the_sum_of_its_stages() -> None:
    forecast = simulate(setup(ScheduleSettings(4, 4, 0), training=3.0, publication=0.5), 8)
    assert forecast.step_seconds == pytest.approx(2 + 3 + 0.5)
    assert forecast.trainer_idle == pytest.approx(2.5 / 5.5)
    assert forecast.engines_idle == pytest.approx(3.5 / 5.5)
    assert forecast.running_sequences == pytest.approx(4 * 2 / 5.5)
    assert forecast.ages == {0: forecast.steps * 4}
    assert forecast.tokens_per_step == 800


@pytest.mark.parametrize(("training", "expected"), [(1.0, 2.0), (3.0, 3.0)])
def test_one_step_off_takes_the_longer_of_its_stages(training: float, expected: float) -> None:
    forecast = simulate(setup(ScheduleSettings(4, 4, 1), training=training), 12)
    assert forecast.step_seconds == pytest.approx(expected, rel=1e-6)
    assert forecast.ages == {1: forecast.steps * 4}
    assert forecast.partial_share == 0


def test_streaming_trains_at_the_trainers_pace_and_is_stale() -> None:
    schedule = ScheduleSettings(4, 1, 3, None, ordered=False)
    forecast = simulate(setup(schedule, training=8.0, partial="keepCache"), 20)
    assert forecast.step_seconds == pytest.approx(8.0, rel=1e-6)
    assert forecast.trainer_idle == pytest.approx(0.0, abs=1e-6)
    assert forecast.max_age == 3


def test_a_publication_makes_partial_groups_and_counts_as_the_trainers_wait() -> None:
    """The trainer is three times as fast as the engines: whatever runs at a publication spans it."""
    schedule = ScheduleSettings(4, 4, 8, None, ordered=False)
    forecast = simulate(setup(schedule, training=0.5, publication=0.25, partial="recompute"), 20)
    assert forecast.partial_share > 0.5
    assert forecast.trainer_idle > 0.5
    assert forecast.max_age >= 1


def test_an_empty_budget_is_the_pipeline_without_stale_samples() -> None:
    """Pulls of 1 group are trained as groups finish (all at 2 s), the last one after them: 2 s + 4 x 0.5 s."""
    forecast = simulate(setup(ScheduleSettings(4, 1, 0, 0.0, ordered=False), training=2.0), 8)
    assert forecast.step_seconds == pytest.approx(4.0)
    assert forecast.ages == {0: forecast.steps * 4}


def test_more_staleness_is_never_slower_with_a_long_tail() -> None:
    def step_seconds(max_age: int) -> float:
        schedule = ScheduleSettings(16, 4, max_age, None, ordered=False)
        speeds = [DecodeSpeed(0.01, 8)] * 4
        partial = "recompute" if max_age else "none"
        tail = LogNormal(100, 1.0, 2000)
        return simulate(
            ForecastSetup(schedule, partial, 4, tail, speeds, 16, TrainerSpeed(6 / 10_000)), 60
        ).step_seconds

    times = [step_seconds(age) for age in (0, 1, 4)]
    assert times[0] > 1.1 * times[1]
    assert times[1] >= 0.98 * times[2]


@pytest.mark.parametrize("mean", [0.5, 1.5])
def test_long_tailed_tools_cost_no_training_time_where_late_groups_are_ended(mean: float) -> None:
    """Tools take 0.5 and 1.5 steps in the mean, log-normal with sigma 1.2: at maxAge 4 the trainer is busy for at least
    0.9 of the time with at most a tenth of the groups ended, and much less where it waits for them."""

    def forecast(on_deadline: OnDeadline) -> Forecast:
        schedule = ScheduleSettings(32, 8, 4, ordered=False, on_deadline=on_deadline)
        speeds, training = [DecodeSpeed(1e-4, 256)] * 2, TrainerSpeed(1 / (32 * 8 * 100))
        tools = ToolLatency(mean, 1.2)
        return simulate(
            ForecastSetup(schedule, "recompute", 8, LogNormal(80, 0.7, 1000), speeds, 512, training, tools=tools), 80
        )

    waits, ends, drops = forecast("wait"), forecast("end"), forecast("drop")
    assert 1 - waits.trainer_idle < 0.75
    assert (waits.late_share, waits.max_age) == (0.0, 4)
    for forecast_ in (ends, drops):
        assert 1 - forecast_.trainer_idle >= 0.9
        assert 0 < forecast_.late_share <= 0.1
        assert forecast_.max_age == 4


def test_tools_take_the_mean_that_they_are_said_to_take() -> None:
    rng = np.random.default_rng(0)
    drawn = [ToolLatency(1.5, 0.8).draw(rng) for _ in range(20_000)]
    assert np.mean(drawn) == pytest.approx(1.5, rel=0.03)
    assert np.std(np.log(drawn)) == pytest.approx(0.8, rel=0.03)


def test_the_same_seed_gives_the_same_forecast() -> None:
    tail = LogNormal(50, 1.0, 500)
    schedule = ScheduleSettings(8, 2, 2, 0.5, ordered=False)
    one = ForecastSetup(schedule, "recompute", 2, tail, [DecodeSpeed(0.01, 8)] * 2, 4, TrainerSpeed(1e-3), seed=3)
    assert simulate(one, 20) == simulate(one, 20)


def test_virtual_time_jumps_and_notices_deadlocks() -> None:
    async def sleepers() -> list[float]:
        loop, woken = asyncio.get_running_loop(), []

        async def sleep(seconds: float) -> None:
            await asyncio.sleep(seconds)
            woken.append(loop.time())

        async with asyncio.TaskGroup() as tasks:
            for seconds in (1e6, 3.0, 0.25):
                tasks.create_task(sleep(seconds))
        return woken

    assert run_virtual(sleepers()) == [0.25, 3.0, 1e6]

    async def nobody_comes() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        run_virtual(nobody_comes())


def test_steps_must_be_left_after_the_warm_up() -> None:
    with pytest.raises(ValueError, match="leave none"):
        simulate(setup(ScheduleSettings(4, 4, 0), training=1.0), 3, warm_up=3)
