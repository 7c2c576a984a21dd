"""One step off and fully asynchronous against our own sync, with real processes and long-tailed lengths on two cores.

    .venv/bin/python -m benchmarks.pipelines

All sides run the same processes (an engine and a learner rank of one thread each) on the same job; only the schedule
differs. The limit is the slower of both stages alone, as in the sync runs: generation, or all that is not generation.
These are means by the clock of a whole run, and a neighbour on the same host may lengthen some steps.

`rljob plan` is fed with the medians of the sync runs; its forecasts stand beside the median step. Once more it gets the
training time of the run itself: in sync one stage has the machine's caches, memory and clock rate to itself, and with
both at work (and the driver a third) a batch costs the rank more, which is the machine's doing and not the schedule's.

Is staleness real? Two more sides have a trainer that takes two epochs over each batch, and samples may be four versions
old: the mean age and the share of groups that were interrupted are reported. Their versions are of two groups, so that
one is over while a long response is not, as with the large models that these schedules are for.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, interleaved, ratios, table, write_results
from benchmarks.rljob_run import Run, rljob_run
from rljob_api import load_jobs, resolve
from rljob_trainer.simulation.measured import MeasuredRun, measure
from rljob_trainer.simulation.planning import Planner, calibrated

HERE = Path(__file__).parent
JOB = HERE / "job.yaml"
WARM_UP = 4
GOAL = 0.9
ASYNC = {
    "pipeline.mode": "fullyAsync",
    "pipeline.syncEvery": 2,
    "pipeline.requireBatches": 2,
    "pipeline.staleness.maxAge": 2,
    "pipeline.staleness.fraction": 1.0,
    "batch.groups": "null",
}
PARTIAL = {"pipeline.partialRollout": "recompute"}
SIDES: dict[str, dict[str, Any]] = {
    "sync": {},
    "oneStepOff": {"pipeline.mode": "oneStepOff"},
    "fullyAsync": ASYNC,
    "fullyAsync, partial": ASYNC | PARTIAL,
}
MAX_AGE = 4
SLOWED = ASYNC | {
    "pipeline.syncEvery": 1,
    "pipeline.requireBatches": 1,
    "batch.miniBatchGroups": 2,
    "batch.epochs": 2,
    "pipeline.staleness.maxAge": MAX_AGE,
    "pipeline.staleness.fraction": "null",
}
SLOWED_STEPS = 120
SLOWED_SIDES: dict[str, dict[str, Any]] = {"fullyAsync": SLOWED, "fullyAsync, partial": SLOWED | PARTIAL}


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """One run of one schedule."""

    step_seconds: float
    median_step_seconds: float
    generation_seconds: float
    """A mean. What the trainer waits for samples."""
    training_seconds: float
    """Computing with a batch, without any wait: the median step."""
    mean_age: float
    mixed_groups: float
    """Share of the groups with a response of more than one version."""
    measured: MeasuredRun | None
    """Compute times of a sync run."""

    @property
    def limit_seconds(self) -> float:
        """Of a sync run: the slower of both stages alone, the trainer's with publication and what is no stage's."""
        return max(self.generation_seconds, self.step_seconds - self.generation_seconds)


def run_side(settings: dict[str, Any], folder: Path, steps: int, repetition: int) -> ScheduleRun:
    """Seconds of a step by the clock of the whole run, after the warm-up and before the last step's checkpoint."""
    output = folder / str(repetition)
    run = rljob_run(JOB, output, steps=steps, settings=settings)
    ends = run.column("progress/seconds")[WARM_UP - 1 : -1]
    steps_seconds = [end - begin for begin, end in pairwise(ends)]
    return ScheduleRun(
        step_seconds=fmean(steps_seconds),
        median_step_seconds=median(steps_seconds),
        generation_seconds=fmean(run.column("timing/generate_seconds")[WARM_UP:-1]),
        training_seconds=median(_training(row) for row in run.rows[WARM_UP:-1]),
        mean_age=_mean(run, "age/mean"),
        mixed_groups=_mean(run, "age/mixed_group_ratio"),
        measured=None if settings else measure(output),
    )


def _training(row: dict[str, float]) -> float:
    return sum(row.get(f"timing/{stage}_seconds") or 0.0 for stage in ("score", "advantage", "update"))


def _mean(run: Run, metric: str) -> float:
    return fmean(run.column(metric)[WARM_UP:])


def forecast(name: str, measured: MeasuredRun, training: float | None = None, steps: int = 60) -> float:
    """Seconds of a step as `rljob plan` sees it, from a sync run's compute times. ``training`` replaces that one."""
    assignments = [f"{path}={value}" for path, value in SIDES[name].items()]
    job = resolve(load_jobs(JOB, assignments)[0])
    seconds = measured.seconds if training is None else replace(measured.seconds, training=training)
    planner = Planner(job, measured.lengths, calibrated(measured.job, measured.lengths, seconds))
    return planner.row(planner.own, steps).forecast.step_seconds


def overlap(results: Mapping[str, Sequence[ScheduleRun]]) -> str:
    """Every schedule against sync and its limit."""
    sync = results["sync"]
    limits = [side.limit_seconds for side in sync]
    rows = []
    for name, runs in results.items():
        seconds = [side.step_seconds for side in runs]
        gains = ratios([side.step_seconds for side in sync], seconds)
        reached = ratios(limits, seconds)
        age = median(side.mean_age for side in runs)
        rows.append([name, *(MeasuredSpread.of(values).show() for values in (seconds, gains, reached)), f"{age:.2f}"])
    head = ["schedule", "step s", "over sync", "of the limit", "mean age"]
    return (
        f"{table(head, rows)}\nLimit: {median(limits):.2f} s a step, "
        f"{median(ratios([side.step_seconds for side in sync], limits)):.2f} over sync. Goal: {GOAL:.0%} of it."
    )


def plans(results: Mapping[str, Sequence[ScheduleRun]]) -> str:
    """What `rljob plan` says beside what came of it, by medians; runs and sync runs are paired."""
    measured = [side.measured for side in results["sync"] if side.measured is not None]
    rows = []
    for name, runs in results.items():
        steps = [side.median_step_seconds for side in runs]
        training = [side.training_seconds for side in runs]
        from_sync = [forecast(name, times) for times in measured]
        own = [forecast(name, times, side.training_seconds) for times, side in zip(measured, runs, strict=True)]
        row = [f"{median(values):.2f}" for values in (steps, training, from_sync)]
        row += [_off(from_sync, steps), f"{median(own):.2f}", _off(own, steps)]
        rows.append([name, *row])
    head = ["schedule", "median step s", "training s", "plan from sync", "off by", "with its training", "off by"]
    stages = [times.seconds for times in measured]
    return (
        f"{table(head, rows)}\nStages alone, sync, medians (s): generation {median(s.generation for s in stages):.2f}, "
        f"training {median(s.training for s in stages):.2f}, publication {median(s.publication for s in stages):.3f}, "
        f"rest {median(s.rest for s in stages):.3f}. Goal: off by 10% at most."
    )


def _off(planned: Sequence[float], steps: Sequence[float]) -> str:
    return f"{median(ratios(planned, steps)) - 1:+.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipelines", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()
    machine = Hardware.here()
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: partial(run_side, settings, Path(folder, name), args.steps) for name, settings in SIDES.items()}
        results = interleaved(sides, args.repetitions)
        slowed = {
            name: run_side(settings, Path(folder, f"slowed {name}"), SLOWED_STEPS, 0)
            for name, settings in SLOWED_SIDES.items()
        }
    slowed_rows = [
        [name, f"{side.step_seconds:.2f}", f"{side.mean_age:.2f}", f"{side.mixed_groups:.0%}"]
        for name, side in slowed.items()
    ]
    text = "\n\n".join(
        [
            "# Overlap against lockstep, on two cores",
            overlap(results),
            "What `rljob plan` says:",
            plans(results),
            f"A slowed trainer (two epochs), maxAge {MAX_AGE}. Goals: mean age {MAX_AGE // 2}, 20% interrupted.",
            table(["schedule", "step s", "mean age", "interrupted groups"], slowed_rows),
        ]
    )
    everything = {
        "schedules": {name: [replace(side, measured=None) for side in runs] for name, runs in results.items()},
        "stages": [side.measured.seconds for side in results["sync"] if side.measured is not None],
        "slowed": slowed,
    }
    write_results(args.output, "pipelines", machine, everything, text)


if __name__ == "__main__":
    main()
