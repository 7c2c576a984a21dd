"""Compute times of a run that has been: what a plan needs to know, read from its output folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rljob_api import load_jobs, resolve
from rljob_api.resolved import ResolvedJob
from rljob_trainer.errors import DataError
from rljob_trainer.simulation.lengths import LengthDistribution, recorded
from rljob_trainer.simulation.planning import PlannedSeconds
from rljob_trainer.telemetry import run_folder

_TRAINING = ("timing/score_seconds", "timing/advantage_seconds", "timing/update_seconds")
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run as a source of compute times. ``seconds`` are those of one batch on ``job``'s own pools."""

    job: ResolvedJob
    lengths: LengthDistribution
    seconds: PlannedSeconds


def measure(folder: Path) -> MeasuredRun:
    """Median times of a sync run's steps after the first two. Raises ``DataError`` when they cannot be had from it."""
    job_file = folder / run_folder.JOB
    if not job_file.exists():
        raise DataError(f"{folder} is not the output folder of a run (it has no {run_folder.JOB}); pass one")
    job = resolve(load_jobs(job_file)[0])
    if job.spec.pipeline.mode != "sync":
        raise DataError(
            f"{folder} is a run in mode {job.spec.pipeline.mode}, whose stages overlap, so the time to generate a "
            "batch alone is unknown; run a few steps with --set pipeline.mode=sync"
        )
    rows = [row for row in run_folder.read_lines(folder / run_folder.METRICS) if row["step"] > 0]
    # The first steps warm caches up; the last one is left out with its checkpoint.
    rows = rows[_WARM_UP:-1]
    if not rows:
        raise DataError(f"{folder} has fewer than {_WARM_UP + 2} steps; let the run continue")

    def stage(*names: str) -> float:
        return median(sum(row.get(name) or 0.0 for name in names) for row in rows)

    generation, training = stage("timing/generate_seconds"), stage(*_TRAINING)
    publication = stage("timing/publish_seconds")
    busy = [sum(row.get(f"timing/{name}_seconds") or 0.0 for name in ("validation", "checkpoint")) for row in rows]
    steps = [row["timing/step_seconds"] - other for row, other in zip(rows, busy, strict=True)]
    rest = max(0.0, median(steps) - generation - training - publication)
    return MeasuredRun(
        job,
        recorded(folder, job.spec.batch.samples_per_prompt),
        PlannedSeconds(generation, training, publication, rest),
    )
