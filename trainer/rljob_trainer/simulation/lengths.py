"""How long responses are: what a simulated engine has to generate for each prompt.

A distribution draws whole groups, because the samples of one prompt resemble each other: recorded lengths keep that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rljob_api import load_jobs
from rljob_trainer.errors import DataError
from rljob_trainer.telemetry import run_folder

Lengths = npt.NDArray[np.int64]


class LengthDistribution(Protocol):
    """Response lengths in tokens."""

    def draw(self, rng: np.random.Generator, groups: int, n: int) -> Lengths:
        """``[groups, n]``, each at least 1."""
        ...

    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Exponential:
    """Every token is as likely to be the last as any other: the long tail that has no parameter besides its mean."""

    mean: float
    limit: int

    def draw(self, rng: np.random.Generator, groups: int, n: int) -> Lengths:
        return np.clip(np.rint(rng.exponential(self.mean, (groups, n))), 1, self.limit).astype(np.int64)

    def describe(self) -> str:
        return f"exponential, mean {self.mean:.0f} tokens, truncated at {self.limit}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """The usual long tail, cut at the longest response that the job allows. ``sigma`` is that of the logarithm."""

    median: float
    sigma: float
    limit: int

    def draw(self, rng: np.random.Generator, groups: int, n: int) -> Lengths:
        drawn = self.median * np.exp(self.sigma * rng.standard_normal((groups, n)))
        return np.clip(np.rint(drawn), 1, self.limit).astype(np.int64)

    def describe(self) -> str:
        return f"log-normal, median {self.median:.0f} tokens, sigma {self.sigma:.2f}, truncated at {self.limit}"


@dataclass(frozen=True, slots=True)
class ToolLatency:
    """Seconds that a group's tools take, log-normal with this mean; ``sigma`` is that of the logarithm."""

    mean: float
    sigma: float

    def draw(self, rng: np.random.Generator) -> float:
        """For one group."""
        # The mean of a log-normal is exp(mu + sigma^2 / 2).
        return float(self.mean * np.exp(self.sigma * rng.standard_normal() - self.sigma**2 / 2))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Lengths that a run had, by prompt; groups are drawn from them with replacement.

    A group of another size than those recorded takes its samples from one prompt's lengths, with replacement.
    """

    by_prompt: Sequence[Sequence[int]]
    source: str

    def draw(self, rng: np.random.Generator, groups: int, n: int) -> Lengths:
        drawn = np.empty((groups, n), np.int64)
        for row, prompt in enumerate(rng.integers(len(self.by_prompt), size=groups)):
            lengths = self.by_prompt[prompt]
            drawn[row] = lengths if len(lengths) == n else rng.choice(lengths, n)
        return np.maximum(drawn, 1)

    def describe(self) -> str:
        lengths = np.concatenate([np.asarray(group) for group in self.by_prompt])
        middle, high = np.quantile(lengths, [0.5, 0.99])
        return (
            f"{len(lengths)} responses to {len(self.by_prompt)} prompts in {self.source}: median {middle:.0f}, "
            f"99 % below {high:.0f}, longest {lengths.max()} tokens"
        )


def parse_lengths(text: str, *, limit: int, n: int) -> LengthDistribution:
    """``exponential:MEAN``, ``lognormal:MEDIAN,SIGMA``, or the path of recorded lengths. Raises ``DataError``."""
    kind, separator, numbers = text.partition(":")
    if not separator or kind not in ("exponential", "lognormal"):
        return recorded(Path(text), n)
    wanted = {"exponential": 1, "lognormal": 2}[kind]
    try:
        values = [float(number) for number in numbers.split(",")]
    except ValueError:
        values = []
    if len(values) != wanted or not all(0 < value < float("inf") for value in values):
        raise DataError(f"{text!r} is not a distribution; use exponential:MEAN or lognormal:MEDIAN,SIGMA (tokens)")
    return Exponential(values[0], limit) if kind == "exponential" else LogNormal(values[0], values[1], limit)


def recorded(path: Path, n: int) -> Recorded:
    """Lengths from a run's output folder (its sample files), or from a text file with one length a line.

    In a text file ``n`` lines after one another belong to one prompt. Raises ``DataError``.
    """
    if path.is_dir():
        return _from_run(path)
    try:
        values = [int(line) for line in path.read_text().split()]
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: {problem}; write one length (tokens) per line, or pass a run's folder") from None
    if not values or min(values) < 0:
        raise DataError(f"{path} has no lengths, or negative ones; write one length (tokens) per line")
    return Recorded([values[start : start + n] for start in range(0, len(values), n)], str(path))


def _from_run(folder: Path) -> Recorded:
    by_prompt: dict[tuple[int, str], list[int]] = defaultdict(list)
    held_out = _validation_sources(folder)
    for step, file in run_folder.sample_files(folder).items():
        for row in run_folder.read_samples(file):
            if row.tokens is not None and row.source not in held_out:
                by_prompt[step, row.prompt].append(row.tokens)
    if not by_prompt:
        raise DataError(
            f"{folder} has no samples with lengths; run the job with logging.samplesEvery: 1 and "
            "logging.samplesPerWrite as large as a batch, or use --lengths exponential:MEAN"
        )
    return Recorded(list(by_prompt.values()), str(folder))


def _validation_sources(folder: Path) -> set[str]:
    """Names of the run's validation sets, whose samples lie in the same files."""
    job = folder / run_folder.JOB
    if not job.exists():
        return set()
    return {part.name for job in load_jobs(job) for part in job.spec.data.validation}
