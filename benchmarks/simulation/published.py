"""Published step times of a 7B model (colocated, one step off, fully asynchronous) and what the simulator says to them.

The tables are those of verl's one_step_off_policy and fully_async_policy recipes (0.7.0; Qwen2.5-Math-7B, DAPO, H20).
The simulator is fed with their compute times (generation of a batch by itself, scoring, update), never with waits or
step times. One number is fitted, ``saturation``: how many sequences double an engine's decoding time, from the row of
staleness 0, which therefore proves nothing. What a step took beyond its stages (3 to 8 % of the colocated rows) is
known from step times only, so the simulator does without it and is that much too fast.

Response lengths were not published. They are taken as exponential (every token as likely to be the last as any other),
which has no parameter left: its mean only sets the unit in which the generation time is measured. ``shapes`` shows what
other tails would have given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rljob_trainer.pipeline.schedule import ScheduleSettings
from rljob_trainer.simulation.engine import DecodeSpeed
from rljob_trainer.simulation.forecast import Forecast, ForecastSetup, simulate
from rljob_trainer.simulation.lengths import Exponential, LengthDistribution, LogNormal
from rljob_trainer.simulation.rollout import TrainerSpeed

GROUPS, SAMPLES = 512, 16
SLOTS = 1024
"""Sequences that an engine runs at once, in those releases' default."""
NO_BOUND = 64
"""The recipes bound the number of samples ahead, not their age."""


@dataclass(frozen=True, slots=True)
class Colocated:
    """A colocated run: seconds of the stages of a step, and of the step."""

    engines: int
    generation: float
    scoring: float
    update: float
    step: float


@dataclass(frozen=True, slots=True)
class OneStepOff:
    """A run with one batch ahead; ``generation`` is that of a batch on its own pool, by itself."""

    engines: int
    generation: float
    scoring: float
    update: float
    step: float


LARGE = Colocated(engines=32, generation=177.85, scoring=53.92, update=113.81, step=356.30)
"""128 GPUs, engines of 4, responses up to 28K tokens."""
ASYNC_ENGINES, ASYNC_UPDATE, ASYNC_LIMIT = 16, 113.16, 28672
"""64 GPUs roll out, 64 train (update published for staleness 0.5); 4 pulls of 4 x 32 groups a step."""
STALENESS: Mapping[float, float] = {0.0: 231.34, 0.1: 171.30, 0.3: 146.11, 0.5: 150.63}
"""Budget of samples ahead -> seconds of a step."""
SMALL: Mapping[str, tuple[Colocated, OneStepOff, int]] = {
    "FSDP2": (Colocated(16, 321.0, 88.0, 286.0, 749.0), OneStepOff(4, 458.0, 108.0, 337.0, 520.0), 20480),
    "Megatron": (Colocated(8, 207.0, 119.0, 344.0, 699.0), OneStepOff(2, 501.0, 120.0, 347.0, 566.0), 8192),
}
"""16 GPUs colocated, or 4 that roll out and 12 that train; with the longest response."""


@dataclass(frozen=True, slots=True)
class ForecastComparison:
    """One row of the table. ``fitted``: it was used for the parameter."""

    name: str
    published: float
    forecast: Forecast
    fitted: bool = False

    @property
    def deviation(self) -> float:
        return self.forecast.step_seconds / self.published - 1


def exponential(limit: int) -> Exponential:
    """A batch's longest response is about as long as allowed: the expected maximum is mean x harmonic number."""
    return Exponential(limit / (math.log(GROUPS * SAMPLES) + 0.5772), limit)


def setup(
    schedule: ScheduleSettings,
    lengths: LengthDistribution,
    engines: int,
    speed: DecodeSpeed,
    training: float,
) -> ForecastSetup:
    """``training`` seconds a batch; recipes with a budget interrupt what runs at a publication."""
    mean = float(lengths.draw(np.random.default_rng(0), 4096, SAMPLES).mean())
    return ForecastSetup(
        schedule=schedule,
        partial_rollout="recompute" if schedule.fraction else "none",
        samples_per_prompt=SAMPLES,
        lengths=lengths,
        engines=[speed] * engines,
        max_concurrent=SLOTS,
        trainer=TrainerSpeed(training / (GROUPS * SAMPLES * mean)),
    )


def whole(max_age: int) -> ScheduleSettings:
    """A batch is one pull."""
    return ScheduleSettings(GROUPS, GROUPS, max_age)


def budget(fraction: float) -> ScheduleSettings:
    """The recipes' streaming: 4 pulls of 4 x 32 groups; a budget of 0 is the mode without stale samples."""
    return ScheduleSettings(GROUPS, GROUPS // 4, NO_BOUND if fraction else 0, fraction, ordered=False)


def alone(lengths: LengthDistribution, engines: int, generation: float, saturation: float) -> DecodeSpeed:
    """The speed with which ``engines`` generate one batch in ``generation`` seconds."""
    trial = simulate(setup(whole(0), lengths, engines, DecodeSpeed(1.0, saturation), 0.0), 8, warm_up=0)
    return DecodeSpeed(generation / trial.step_seconds, saturation)


def fitted_speed(lengths: LengthDistribution) -> DecodeSpeed:
    """The fitted number, by bisection: staleness 0 takes as long as published, or as near as it can."""
    low, high = 8.0, 65536.0
    for _ in range(12):
        saturation = math.sqrt(low * high)
        speed = alone(lengths, LARGE.engines, LARGE.generation, saturation)
        if staleness(0.0, lengths, speed, steps=16).step_seconds > STALENESS[0.0]:
            low = saturation
        else:
            high = saturation
    return speed


def staleness(
    fraction: float,
    lengths: LengthDistribution,
    speed: DecodeSpeed,
    *,
    steps: int = 40,
    engines: int = ASYNC_ENGINES,
    update: float = ASYNC_UPDATE,
) -> Forecast:
    """64 + 64 GPUs (unless said otherwise) with a budget of ``fraction``."""
    return simulate(setup(budget(fraction), lengths, engines, speed, update), steps)


def comparisons(lengths: LengthDistribution, speed: DecodeSpeed, *, steps: int = 40) -> Iterator[ForecastComparison]:
    """All rows, colocated ones first."""
    scored = LARGE.scoring + LARGE.update
    colocated = simulate(setup(whole(0), lengths, LARGE.engines, speed, scored), steps)
    yield ForecastComparison("colocated, 128 GPUs", LARGE.step, colocated)
    for name, (together, _, limit) in SMALL.items():
        few = exponential(limit)
        own = alone(few, together.engines, together.generation, speed.saturation)
        training = together.scoring + together.update
        forecast = simulate(setup(whole(0), few, together.engines, own, training), steps)
        yield ForecastComparison(f"colocated, 16 GPUs, {name}", together.step, forecast)
    for fraction, published in STALENESS.items():
        name = f"64 + 64, staleness {fraction:g}"
        yield ForecastComparison(
            name, published, staleness(fraction, lengths, speed, steps=steps), fitted=fraction == 0
        )
    for name, (_, apart, limit) in SMALL.items():
        few = exponential(limit)
        own = alone(few, apart.engines, apart.generation, speed.saturation)
        training = apart.scoring + apart.update
        forecast = simulate(setup(whole(1), few, apart.engines, own, training), steps)
        yield ForecastComparison(f"one step off, 4 + 12, {name}", apart.step, forecast)


def shapes() -> Sequence[LengthDistribution]:
    """Tails beside the exponential one; each has a batch's longest response at the limit."""
    return [LogNormal(ASYNC_LIMIT / math.exp(3.7 * sigma), sigma, ASYNC_LIMIT) for sigma in (0.4, 0.5, 0.6, 0.7)]


def best_split(lengths: LengthDistribution, speed: DecodeSpeed, fraction: float) -> list[tuple[int, Forecast]]:
    """128 GPUs in other proportions: engines of 4 GPUs, the update's time in inverse proportion to the rest."""
    return [
        (
            engines,
            staleness(fraction, lengths, speed, engines=engines, update=ASYNC_UPDATE * 64 / (128 - 4 * engines)),
        )
        for engines in range(4, 29, 2)
    ]
