"""How measurements become figures: steps of a run, spreads over repetitions, ratios of pairs, tables. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.machine import Hardware

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """One training step as it was measured from outside."""

    seconds: float
    generated: int
    """Response tokens that were sampled (up to and with the end-of-text token; padding does not count)."""
    trained: int
    """Response tokens that went through the loss, counted once per epoch."""

    @property
    def rate(self) -> float:
        """Trained and generated tokens per second."""
        return (self.generated + self.trained) / self.seconds


@dataclass(frozen=True, slots=True)
class MeasuredSpread:
    """Smallest, middle and largest of several measurements."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> MeasuredSpread:
        """Raises ``ValueError`` without values."""
        if not values:
            raise ValueError("a spread needs at least one value")
        return cls(min(values), median(values), max(values))

    def multiplied(self, factor: float) -> MeasuredSpread:
        return MeasuredSpread(self.min * factor, self.median * factor, self.max * factor)

    def show(self, form: str = ".2f") -> str:
        return f"{self.median:{form}} ({self.min:{form}} – {self.max:{form}})"


def steady(steps: Sequence[Step], warm_up: int) -> list[Step]:
    """The steps after the first ``warm_up``. Raises ``ValueError`` when none are left."""
    rest = list(steps[warm_up:])
    if not rest:
        raise ValueError(f"{len(steps)} steps were measured, which leaves none after {warm_up} of warm-up")
    return rest


def interleaved(sides: Mapping[str, Callable[[int], T]], repetitions: int) -> dict[str, list[T]]:
    """Runs every side once per repetition, in turn (A B A B ...), so that a drift of the machine meets all alike."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    for repetition in range(repetitions):
        for name, side in sides.items():
            print(f"repetition {repetition + 1} of {repetitions}: {name}", flush=True)
            results[name].append(side(repetition))
    return results


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Pair by pair, in the order in which they were measured."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows)) + "\n"


def plain(value: Any) -> Any:
    """Dataclasses, paths and mappings as what JSON knows; floats with five significant digits."""
    if hasattr(value, "__dataclass_fields__"):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write_results(folder: Path, name: str, machine: Hardware, results: Any, text: str) -> None:
    """``<name>.json`` with everything and ``<name>.md`` with what a reader wants, the machine in both. Warns of results
    that should not be kept."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"machine": machine.to_json(), "results": plain(results)}
    (folder / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    (folder / f"{name}.md").write_text(f"{text.rstrip()}\n\n{machine.sentence()}.\n")
    print(f"\n{text.rstrip()}\n\nwritten: {folder / name}.json and .md")
    for doubt in machine.doubts():
        print(f"warning: {doubt}")
