"""Trains the quick start and its twins with several seeds and writes accuracy and seconds.

    .venv/bin/python -m benchmarks.quickstart                       # five seeds of each, about an hour
    .venv/bin/python -m benchmarks.quickstart --jobs torch --seeds 1 2

Every run is a whole `rljob run` as a user types it, one after the other. Accuracy is exact answers on held-out problems
(greedy); *reached* is the training time at the first validation of 90 % or more; *seconds* is the whole command.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environments import ROOT
from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, table, write_results
from benchmarks.rljob_run import rljob_run

HERE = Path(__file__).parent
JOBS = {
    "torch": ROOT / "examples" / "quickstart.yaml",
    "vllm": ROOT / "examples" / "quickstart-vllm.yaml",
    "grpo": ROOT / "examples" / "quickstart-grpo.yaml",
}
GOAL = 0.9
ACCURACY = "validation/held-out/mean@1"


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """One run with one seed."""

    job: str
    seed: int
    accuracy: float
    best_accuracy: float
    reached_seconds: float | None
    """Training time when the goal was first seen; None: never."""
    reached_step: int | None
    seconds: float
    """The whole command, start and end included."""
    steps: int


def train(name: str, seed: int, threads: int) -> TrainedRun:
    with tempfile.TemporaryDirectory() as output:
        started = time.perf_counter()
        settings = {"seed": seed, "model.random.seed": seed}
        run = rljob_run(JOBS[name], Path(output) / "run", threads=threads, settings=settings)
        seconds = time.perf_counter() - started
    scored = [row for row in run.rows if ACCURACY in row]
    reached = next((row for row in scored if row[ACCURACY] >= GOAL), None)
    return TrainedRun(
        job=name,
        seed=seed,
        accuracy=scored[-1][ACCURACY],
        best_accuracy=max(row[ACCURACY] for row in scored),
        reached_seconds=reached["progress/seconds"] if reached else None,
        reached_step=round(reached["progress/step"]) if reached else None,
        seconds=seconds,
        steps=round(run.rows[-1]["progress/step"]),
    )


def show(trained: Sequence[TrainedRun]) -> str:
    """The table of one job."""
    rows = []
    for t in trained:
        reached = "never" if t.reached_seconds is None else f"{t.reached_seconds:.0f} (step {t.reached_step})"
        rows.append([str(t.seed), f"{t.accuracy:.1%}", reached, f"{t.seconds:.0f}", str(t.steps)])
    accuracy, seconds = (
        MeasuredSpread.of([100 * t.accuracy for t in trained]),
        MeasuredSpread.of([t.seconds for t in trained]),
    )
    good = sum(t.accuracy >= GOAL for t in trained)
    return "\n".join(
        [
            f"{good} of {len(trained)} seeds end at {GOAL:.0%} or more. Median (smallest – largest): accuracy "
            f"{accuracy.show('.1f')} %, the whole command {seconds.show('.0f')} s.",
            "",
            table(["seed", "accuracy", f"{GOAL:.0%} reached, s", "seconds", "steps"], rows),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", choices=list(JOBS), nargs="+", default=list(JOBS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of every process (default 1)")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    for name in arguments.jobs:
        machine, trained = Hardware.here(), []
        for seed in arguments.seeds:
            print(f"{name}, seed {seed}", flush=True)
            trained.append(train(name, seed, arguments.threads))
            print(f"  {trained[-1]}", flush=True)
        write_results(arguments.results, name, machine, trained, show(trained))


if __name__ == "__main__":
    main()
