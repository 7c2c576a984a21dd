"""``python -m benchmarks.deadlines``: does training wait for slow tools?

The tool's latency is log-normal (sigma 1.2) with a mean of 0.5 and 1.5 steps, ``maxAge`` is 4. For each value of
``staleness.onDeadline``: how much of the time the trainer works, and how many groups were ended or dropped; simulated,
and in a real run (driver and trainer, and an engine in its own process), in steps of the length that the same run has
without a latency.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import get_args

from benchmarks.machine import Hardware
from benchmarks.measuring import table, write_results
from benchmarks.rljob_run import Run, rljob_run
from rljob_api.spec.pipeline import OnDeadline
from rljob_trainer.pipeline.schedule import ScheduleSettings
from rljob_trainer.simulation.engine import DecodeSpeed
from rljob_trainer.simulation.forecast import ForecastSetup, simulate
from rljob_trainer.simulation.lengths import LogNormal, ToolLatency
from rljob_trainer.simulation.rollout import TrainerSpeed

HERE = Path(__file__).parent
MAX_AGE, SIGMA, GROUPS, PULL, SAMPLES = 4, 1.2, 32, 8, 8
WARM_UP = 8
"""Steps until ages no longer grow."""


@dataclass(frozen=True, slots=True)
class Waited:
    """What one way of dealing with late groups came to."""

    where: str
    steps_of_latency: float
    on_deadline: str
    rate: float
    """Share of the time in which the trainer works."""
    late: float
    """Groups ended or dropped, of those that were trained."""
    oldest: int


def simulated(latency: float, on_deadline: OnDeadline) -> Waited:
    """Engines far faster than the trainer, whose step takes a second."""
    setup = ForecastSetup(
        ScheduleSettings(GROUPS, PULL, MAX_AGE, ordered=False, on_deadline=on_deadline),
        "recompute",
        SAMPLES,
        LogNormal(80, 0.7, 1000),
        [DecodeSpeed(1e-4, 256)] * 2,
        512,
        TrainerSpeed(1 / (GROUPS * SAMPLES * 100)),
        tools=ToolLatency(latency, SIGMA),
    )
    forecast = simulate(setup, 300)
    return Waited("simulated", latency, on_deadline, 1 - forecast.trainer_idle, forecast.late_share, forecast.max_age)


def real(steps: int) -> Iterator[Waited]:
    """A run without latency first, whose steps are the measure of the others."""
    alone = _run(0.0, "wait", steps)
    step_seconds = mean(_step_seconds(alone))
    yield _waited(alone, 0.0, "wait")
    for latency in (0.5, 1.5):
        for on_deadline in get_args(OnDeadline):
            run = _run(latency * step_seconds, on_deadline, steps)
            yield _waited(run, latency, on_deadline)


def _run(seconds: float, on_deadline: str, steps: int) -> Run:
    settings = {
        "rollout.environment.params.mean": seconds,
        "pipeline.staleness.onDeadline": on_deadline,
        "stop.steps": steps,
    }
    with tempfile.TemporaryDirectory(prefix="rljob-deadlines-") as scratch:
        return rljob_run(HERE / "job.yaml", Path(scratch) / "run", settings=settings)


def _step_seconds(run: Run) -> list[float]:
    ends = run.column("progress/seconds")[WARM_UP - 1 : -1]  # the last step writes a checkpoint
    return [end - begin for begin, end in pairwise(ends)]


def _waited(run: Run, latency: float, on_deadline: str) -> Waited:
    rows = run.rows[WARM_UP:]
    late = sum(row["pipeline/late_groups"] for row in rows) / (GROUPS * len(rows))
    # Not by the clock against the run without a latency: that would tell of the machine as well.
    rate = 1 - mean(row["pipeline/learner_idle_ratio"] for row in rows)
    return Waited("real", latency, on_deadline, rate, late, int(max(row["age/max"] for row in rows)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.deadlines", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="of each real run; 0: simulate only")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    waited = [simulated(latency, choice) for latency in (0.5, 1.5) for choice in get_args(OnDeadline)]
    if args.steps:
        waited += real(args.steps)
    head = ["", "tool latency, steps", "onDeadline", "rate of the trainer", "late groups", "oldest age"]
    rows = [
        [one.where, f"{one.steps_of_latency:g}", one.on_deadline, f"{one.rate:.2f}", f"{one.late:.1%}", str(one.oldest)]
        for one in waited
    ]
    write_results(args.results, "deadlines", Hardware.here(), [asdict(one) for one in waited], table(head, rows))
    print(table(head, rows))


if __name__ == "__main__":
    main()
