"""A run as its output folder tells it, read for the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rljob_trainer.errors import DataError
from rljob_trainer.telemetry import run_folder
from rljob_trainer.telemetry.gantt import Bar, last_steps
from rljob_trainer.telemetry.run_folder import VALIDATION_STEP, SampleRow, read_lines, read_samples, sample_files
from rljob_trainer.telemetry.summary import Summary, ValidationHistory, ValidationResult

Samples = tuple[int, Sequence[SampleRow]]
"""A step, and samples written after it."""


@dataclass(frozen=True)
class RunRecord:
    """What is known of a run. Everything but the metrics may be missing (a run that was killed has no summary)."""

    name: str
    steps: Sequence[Mapping[str, Any]]
    summary: Summary | None = None
    job_yaml: str | None = None
    before: Samples | None = None
    after: Samples | None = None
    validation: Mapping[str, Mapping[str, ValidationResult]] = field(default_factory=dict)
    timeline: Sequence[Bar] = ()
    """The last steps."""

    @property
    def last_step(self) -> int:
        """The number of steps that are done."""
        return self.summary.steps if self.summary else int(self.steps[-1]["step"])

    def column(self, name: str) -> tuple[list[float], list[float | None]]:
        """Steps and values of a metric, for the steps that have it. What was validated beside training stands at the
        step whose weights were validated."""
        own = VALIDATION_STEP if name.startswith("validation/") else "step"
        found = [(float(record.get(own, record["step"])), record[name]) for record in self.steps if name in record]
        return [step for step, _ in found], [value for _, value in found]

    def values(self, name: str) -> list[float]:
        """The finite values of a metric."""
        return [value for value in self.column(name)[1] if value is not None and math.isfinite(value)]

    def has(self, name: str) -> bool:
        return bool(self.values(name))

    def names(self) -> set[str]:
        """All metrics that any step has."""
        return {name for record in self.steps for name in record} - {"step", "time"}


def read_run(folder: Path) -> RunRecord:
    """Reads an output folder. Raises ``DataError`` when there is no run in it or a file is not what it should be."""
    steps = list(read_lines(folder / run_folder.METRICS))
    summary = Summary.read(folder) if (folder / run_folder.SUMMARY).exists() else None
    if not steps and summary is None:
        raise DataError(f"{folder} has neither {run_folder.METRICS} nor {run_folder.SUMMARY}: no run to report on")
    job = folder / run_folder.JOB
    timeline = folder / run_folder.TIMELINE
    before, after = _first_and_last_samples(folder)
    return RunRecord(
        name=summary.job if summary else folder.resolve().name,
        steps=steps,
        summary=summary,
        job_yaml=job.read_text(encoding="utf-8") if job.exists() else None,
        before=before,
        after=after,
        validation=ValidationHistory.read(folder).by_source(),
        timeline=last_steps(timeline) if timeline.exists() else (),
    )


def _first_and_last_samples(folder: Path) -> tuple[Samples | None, Samples | None]:
    """The first samples of a run, and the latest that answer some of the same prompts (else simply the latest)."""
    files = list(sample_files(folder).items())
    if not files:
        return None, None
    first_step, first_path = files[0]
    first = read_samples(first_path)
    prompts = {(row.source, row.prompt) for row in first}
    latest: Samples | None = None
    for step, path in reversed(files[1:]):
        rows = read_samples(path)
        latest = latest or (step, rows)
        if any((row.source, row.prompt) in prompts for row in rows):
            return (first_step, first), (step, rows)
    return (first_step, first), latest
