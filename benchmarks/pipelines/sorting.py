"""Do engines that come back from validation serve the version that they are taken to serve?

    .venv/bin/python -m benchmarks.pipelines.sorting [--checkout FOLDER] [--steps N]

Sorts four letters with a learning rate at which neighbouring versions are 0.1 nats per token apart and more, fully
asynchronous, with validation beside the steps; counts what the run says of engines that deviate from the trainer. The
goal is that it says nothing. ``--checkout`` also runs the code of another checkout of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environments import ROOT, peer_environment
from benchmarks.machine import Hardware
from benchmarks.measuring import table, write_results
from benchmarks.rljob_run import RunFailedError, read_run

HERE = Path(__file__).parent
JOB = HERE / "sorting.yaml"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
OF_A_MISMATCH = {
    "sent their weights once more": re.compile(r"it gets its weights (again|once more)"),
    "given up": re.compile(
        r"still deviates from the trainer|is taken for lost|after (its weights were sent again|a second sending)"
    ),
    "not let in": re.compile(r"it does not serve"),
}
"""What a run says of engines that do not hold what they should."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """What one run showed."""

    code: str
    steps: int
    said: dict[str, int]
    """Sentences about engines that deviate."""
    worst_canary: float
    """Nats per token, over all publications."""
    reward: float
    """Of the last step."""
    sentences: list[str]


def write_data(folder: Path) -> None:
    """4,000 rows to learn from and 256 to validate on, the same every time."""
    drawn = random.Random(4)
    for name, rows in (("train", 4000), ("held-out", 256)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(rows):
                letters = drawn.choices(LETTERS, k=4)
                row = {"question": "".join(letters) + ">", "answer": "".join(sorted(letters))}
                file.write(json.dumps(row) + "\n")


def run_sorting(checkout: Path, steps: int, name: str) -> Sorted:
    """The job with the code of a checkout. Raises ``RunFailedError``."""
    with tempfile.TemporaryDirectory(prefix="sorting-") as temporary:
        folder = Path(temporary)
        write_data(folder)
        shutil.copy(JOB, folder / "job.yaml")
        code = [str(checkout / part) for part in ("trainer", "api")]
        environment = peer_environment(1) | {"PYTHONPATH": os.pathsep.join(code)}
        command = [sys.executable, "-m", "rljob_trainer.cli", "run", str(folder / "job.yaml")]
        command += ["--output", str(folder / "run"), "--steps", str(steps)]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        printed = (ended.stdout + ended.stderr).splitlines()
        if ended.returncode != 0:
            raise RunFailedError("\n".join(printed[-40:]))
        run = read_run(folder / "run")
    sentences = [line for line in printed if any(pattern.search(line) for pattern in OF_A_MISMATCH.values())]
    said = {what: sum(bool(pattern.search(line)) for line in printed) for what, pattern in OF_A_MISMATCH.items()}
    worst = max(run.column("mismatch/canary/max"), default=0.0)
    return Sorted(name, len(run.rows), said, worst, run.column("reward/mean")[-1], sentences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, help="another checkout, whose code is run as well")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=1)
    arguments = parser.parse_args()
    sides = {"this code": ROOT}
    if arguments.checkout:
        sides["the other checkout"] = arguments.checkout.resolve()
    machine = Hardware.here()
    runs = []
    for _ in range(arguments.repetitions):
        for name, checkout in sides.items():
            runs.append(run_sorting(checkout, arguments.steps, name))
            print(runs[-1], flush=True)
    rows = [
        [r.code, str(r.steps), *map(str, r.said.values()), f"{r.worst_canary:.2g}", f"{r.reward:.2f}"] for r in runs
    ]
    text = table(["code", "steps", *(f"engines {what}" for what in OF_A_MISMATCH), "worst canary", "reward"], rows)
    write_results(HERE / "results", "sorting", machine, runs, text)
    return int(any(any(run.said.values()) for run in runs if run.code == "this code"))


if __name__ == "__main__":
    sys.exit(main())
