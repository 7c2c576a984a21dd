"""Keeps the learning curve of one quick start: exact answers on held-out problems, by step.

make quickstart && .venv/bin/python -m benchmarks.quickstart.curve runs/quickstart
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.machine import Hardware
from benchmarks.measuring import table, write_results
from benchmarks.quickstart.__main__ import ACCURACY, HERE


@dataclass(frozen=True, slots=True)
class Curve:
    """Shares of exact answers, and the steps after which they were measured; 0 is before training."""

    seed: int
    steps: list[int]
    accuracy: list[float]


def curve(folder: Path) -> Curve:
    """The curve of a finished run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scored = {row["step"]: row[ACCURACY] for row in rows if ACCURACY in row}
    return Curve(yaml.safe_load((folder / "job.yaml").read_text())["spec"]["seed"], [*scored], [*scored.values()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the output folder of a run of examples/quickstart.yaml")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    seen = curve(arguments.run)
    rows = [[str(step), f"{share:.1%}"] for step, share in zip(seen.steps, seen.accuracy, strict=True)]
    text = f"One run with seed {seen.seed}.\n\n{table(['step', 'exact answers, held out'], rows)}"
    write_results(arguments.results, "curve", Hardware.here(), seen, text)


if __name__ == "__main__":
    main()
