"""Runs the real loop and the real schedule with simulated engines and trainer, and says what a step comes to.

    forecast = simulate(Setup(...), steps=40)
    forecast.step_seconds, forecast.trainer_idle, forecast.mean_age

Inputs are compute times; waits are what comes out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rljob_api.spec.pipeline import PartialRollout
from rljob_trainer.pipeline.loop import Pipeline
from rljob_trainer.pipeline.parts import StepRecord
from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings
from rljob_trainer.simulation.clock import run_virtual
from rljob_trainer.simulation.engine import DecodeSpeed
from rljob_trainer.simulation.lengths import LengthDistribution, ToolLatency
from rljob_trainer.simulation.rollout import EndlessFeed, SimulatedRollout, SimulatedTrainer, TrainerSpeed


@dataclass(frozen=True, slots=True)
class ForecastSetup:
    """All that a forecast depends on. ``engines`` holds the speed of each; they may differ."""

    schedule: ScheduleSettings
    partial_rollout: PartialRollout
    samples_per_prompt: int
    lengths: LengthDistribution
    engines: Sequence[DecodeSpeed]
    max_concurrent: int
    trainer: TrainerSpeed
    seed: int = 0
    tools: ToolLatency | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a step looks like once the run is under way (the first steps are left out)."""

    steps: int
    step_seconds: float
    trainer_idle: float
    """Share of the time in which the trainer does not train: waits for samples and publications."""
    engines_idle: float
    """Share of the time in which an engine has no sequence, mean over engines."""
    running_sequences: float
    """Mean number of sequences that run in an engine."""
    ages: Mapping[int, int] = field(repr=False)
    """Age of a group's oldest token at training -> groups."""
    partial_share: float
    """Share of groups that more than one version has made."""
    tokens_per_step: float
    late_share: float
    """Groups that were ended or dropped because they were late, of those that were trained."""

    @property
    def mean_age(self) -> float:
        return sum(age * count for age, count in self.ages.items()) / max(1, sum(self.ages.values()))

    @property
    def max_age(self) -> int:
        return max(self.ages, default=0)


@dataclass(slots=True)
class _Mark:
    """Running totals at a step's boundary."""

    time: float
    trainer_busy: float
    engine_busy: float
    sequence_seconds: float
    partial: int
    tokens: int
    ages: dict[int, int]


def simulate(setup: ForecastSetup, steps: int, *, warm_up: int | None = None) -> Forecast:
    """``steps`` steps in virtual time, of which the first ``warm_up`` (by default those in which ages still grow, at
    most a quarter) do not count. Raises ``ValueError`` when none is left."""
    if warm_up is None:
        warm_up = min(steps // 4, setup.schedule.max_age + 2)
    if steps - warm_up < 1:
        raise ValueError(f"{steps} steps leave none after {warm_up} of warm-up")
    return run_virtual(_simulate(setup, steps, warm_up))


async def _simulate(setup: ForecastSetup, steps: int, warm_up: int) -> Forecast:
    shape = setup.schedule
    rollout = SimulatedRollout(
        setup.engines,
        setup.lengths,
        setup.samples_per_prompt,
        max_concurrent=setup.max_concurrent,
        partial_rollout=setup.partial_rollout,
        seed=setup.seed,
        tools=setup.tools,
    )
    trainer = SimulatedTrainer(rollout, setup.trainer, shape.groups_per_version // shape.groups_per_pull)
    loop = asyncio.get_running_loop()

    def mark() -> _Mark:
        return _Mark(
            time=loop.time(),
            trainer_busy=trainer.busy_seconds,
            engine_busy=sum(engine.busy_seconds for engine in rollout.engines),
            sequence_seconds=sum(engine.sequence_seconds for engine in rollout.engines),
            partial=trainer.partial_groups,
            tokens=trainer.tokens,
            ages=dict(trainer.ages),
        )

    begin = mark()
    late = 0

    async def after_step(record: StepRecord) -> bool:
        nonlocal begin, late
        late += pipeline.take_late()
        if record.step == warm_up:
            begin, late = mark(), 0
        return record.step < steps

    pipeline = Pipeline(
        EndlessFeed(),
        rollout,
        trainer,
        Schedule(shape),
        after_step=after_step,
        sample_deadline_seconds=float("inf"),
    )
    await pipeline.run()
    end = mark()
    seconds, engines = end.time - begin.time, len(setup.engines)
    counted = steps - warm_up
    return Forecast(
        steps=counted,
        step_seconds=seconds / counted,
        trainer_idle=max(0.0, 1 - (end.trainer_busy - begin.trainer_busy) / seconds),
        engines_idle=max(0.0, 1 - (end.engine_busy - begin.engine_busy) / seconds / engines),
        running_sequences=(end.sequence_seconds - begin.sequence_seconds) / seconds / engines,
        ages={age: new for age, count in sorted(end.ages.items()) if (new := count - begin.ages.get(age, 0))},
        partial_share=(end.partial - begin.partial) / (counted * shape.groups_per_version),
        late_share=late / (counted * shape.groups_per_version),
        tokens_per_step=(end.tokens - begin.tokens) / counted,
    )
