"""From a job and a few measured times to what its run will look like, on this split of the devices and on others.

What has to be known are compute times: how long the job's engines need for one batch when nothing else happens, how
long its ranks need to train on one, and how long responses are. Waits are what a plan finds out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rljob_api.resolved import ResolvedJob, ResolvedSpec
from rljob_api.spec.pipeline import PipelineMode
from rljob_trainer.pipeline.schedule import ScheduleSettings
from rljob_trainer.pipeline.shape import schedule_settings
from rljob_trainer.pools.size import engine_count, max_concurrent
from rljob_trainer.simulation.engine import DecodeSpeed
from rljob_trainer.simulation.forecast import Forecast, ForecastSetup, simulate
from rljob_trainer.simulation.lengths import LengthDistribution
from rljob_trainer.simulation.rollout import TrainerSpeed

DEFAULT_SATURATION = 256.0
_MOST_SPLITS = 9


@dataclass(frozen=True, slots=True)
class PlannedSeconds:
    """Compute times of one batch (``batch.groups`` prompts) on the job's own pools, each stage by itself."""

    generation: float
    training: float
    """Everything that the trainer does with a batch: scoring, advantages, update."""
    publication: float = 0.0
    rest: float = 0.0
    """What a step takes besides, whatever the split."""


@dataclass(frozen=True, slots=True)
class Split:
    """One way to share the devices. ``colocated``: engines and ranks take turns on all of them."""

    engines: int
    devices_per_engine: int
    ranks: int
    colocated: bool = False

    @property
    def devices(self) -> int:
        return self.ranks if self.colocated else self.engines * self.devices_per_engine + self.ranks

    def __str__(self) -> str:
        if self.colocated:
            return f"{self.ranks} colocated"
        return f"{self.engines * self.devices_per_engine}:{self.ranks}"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One line of a plan. ``training_seconds`` and ``generation_seconds``: what a step takes if only that stage
    counted, with engines as full as the schedule lets them be; no step is shorter than the longer of both."""

    mode: PipelineMode
    split: Split
    forecast: Forecast
    training_seconds: float
    generation_seconds: float

    @property
    def limit_seconds(self) -> float:
        if self.mode == "sync":
            return self.training_seconds + self.generation_seconds
        return max(self.training_seconds, self.generation_seconds)

    @property
    def device_hours_per_step(self) -> float:
        return self.forecast.step_seconds * self.split.devices / 3600


@dataclass(frozen=True, slots=True)
class Speeds:
    """What compute times come to, apart from any pool's size."""

    engine: DecodeSpeed
    rank_seconds_per_token: float
    """Seconds that one rank would need to train on one response token; ranks share the work evenly."""
    publication_seconds: float = 0.0
    rest_seconds: float = 0.0


def calibrated(
    job: ResolvedJob, lengths: LengthDistribution, seconds: PlannedSeconds, saturation: float = DEFAULT_SATURATION
) -> Speeds:
    """The speeds with which ``job``'s own pools take ``seconds`` for a batch. ``saturation``: running sequences with
    which an engine's decoding step takes twice as long as with none."""
    spec = job.spec
    # All of a simulated generation is in proportion to the time of a token: one trial gives the factor.
    trial = ForecastSetup(
        schedule=whole_batches(spec.batch.groups),
        partial_rollout="none",
        samples_per_prompt=spec.batch.samples_per_prompt,
        lengths=lengths,
        engines=[DecodeSpeed(1.0, saturation)] * engine_count(spec),
        max_concurrent=max_concurrent(spec.rollout),
        trainer=TrainerSpeed(0.0),
    )
    return Speeds(
        engine=DecodeSpeed(seconds.generation / simulate(trial, 8, warm_up=0).step_seconds, saturation),
        rank_seconds_per_token=seconds.training * spec.trainer.ranks / _batch_tokens(spec, lengths),
        publication_seconds=seconds.publication,
        rest_seconds=seconds.rest,
    )


class Planner:
    """Forecasts one job on any split of its devices."""

    def __init__(self, job: ResolvedJob, lengths: LengthDistribution, speeds: Speeds, *, seed: int = 0) -> None:
        self.job = job
        self.own = own_split(job.spec)
        self._lengths = lengths
        self._speeds = speeds
        self._seed = seed
        self._batch_tokens = _batch_tokens(job.spec, lengths)

    def row(self, split: Split, steps: int, mode: PipelineMode | None = None) -> PlanRow:
        """The forecast for one split; ``mode`` other than the job's own: sync or oneStepOff with the job's batch."""
        spec, speeds = self.job.spec, self._speeds
        schedule, partial = schedule_settings(spec), spec.pipeline.partial_rollout
        if mode is not None and mode != spec.pipeline.mode:
            schedule, partial = whole_batches(spec.batch.groups, max_age=0 if mode == "sync" else 1), "none"
        token_seconds = speeds.rank_seconds_per_token / split.ranks
        setup = ForecastSetup(
            schedule=schedule,
            partial_rollout=partial,
            samples_per_prompt=spec.batch.samples_per_prompt,
            lengths=self._lengths,
            engines=[speeds.engine] * split.engines,
            max_concurrent=max_concurrent(spec.rollout),
            trainer=TrainerSpeed(token_seconds, speeds.rest_seconds, speeds.publication_seconds),
            seed=self._seed,
        )
        return PlanRow(
            mode=mode or spec.pipeline.mode,
            split=split,
            forecast=simulate(setup, steps),
            training_seconds=self._batch_tokens * token_seconds + speeds.rest_seconds + speeds.publication_seconds,
            generation_seconds=self._saturated(schedule, split),
        )

    def splits(self) -> Iterator[Split]:
        """Ways to share the job's devices between separate pools, from few engines to many, with the job's own."""
        spec = self.job.spec
        per_engine = max(1, spec.rollout.gpus_per_replica) if spec.placement == "separate" else 1
        devices = self.own.devices
        possible = [
            Split(engines, per_engine, ranks)
            for engines in range(1, devices // per_engine)
            if (ranks := devices - engines * per_engine)
        ]
        stride = -(-len(possible) // _MOST_SPLITS)
        middle = (len(possible) // 2) % stride if stride else 0
        yield from (s for i, s in enumerate(possible) if i % stride == middle or s == self.own)

    def _saturated(self, schedule: ScheduleSettings, split: Split) -> float:
        """Seconds for a batch by engines that are always as full as the schedule lets them be."""
        ahead = float(schedule.max_age + 1)
        if schedule.fraction is not None:
            ahead = min(ahead, 1 + schedule.fraction)
        sequences = ahead * schedule.groups_per_version * self.job.spec.batch.samples_per_prompt
        running = min(max_concurrent(self.job.spec.rollout), sequences / split.engines)
        return self._batch_tokens / (split.engines * self._speeds.engine.tokens_per_second(running))


def own_split(spec: ResolvedSpec) -> Split:
    """The job as it is written."""
    colocated = spec.placement == "colocated"
    devices = spec.trainer.ranks // engine_count(spec) if colocated else spec.rollout.gpus_per_replica
    return Split(
        engines=engine_count(spec),
        devices_per_engine=max(1, devices),
        ranks=spec.trainer.ranks,
        colocated=colocated,
    )


def whole_batches(groups: int, *, max_age: int = 0) -> ScheduleSettings:
    """The schedule of sync (0) and oneStepOff (1)."""
    return ScheduleSettings(groups, groups, max_age)


def _batch_tokens(spec: ResolvedSpec, lengths: LengthDistribution) -> float:
    """Mean number of response tokens in a batch."""
    n = spec.batch.samples_per_prompt
    drawn = lengths.draw(np.random.default_rng(0), max(1, 8192 // n), n)
    return float(drawn.mean()) * n * spec.batch.groups


def plan(planner: Planner, steps: int) -> list[PlanRow]:
    """The job first, then its devices colocated and in lockstep, then other splits (of a sync job: one step off)."""
    spec, own = planner.job.spec, planner.own
    rows = [planner.row(own, steps)]
    together = Split(max(1, own.devices // own.devices_per_engine), own.devices_per_engine, own.devices, colocated=True)
    if not own.colocated:
        rows.append(planner.row(together, steps, "sync"))
    mode: PipelineMode | None = "oneStepOff" if spec.pipeline.mode == "sync" else None
    rows += [planner.row(split, steps, mode) for split in planner.splits() if split != own or mode is not None]
    return rows
