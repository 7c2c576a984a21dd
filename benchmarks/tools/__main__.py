"""``python -m benchmarks.tools``: does a model learn to use a tool, in every pipeline, with every seed?

Both jobs ask for the parity of 16 bits, which a tiny model cannot tell. In ``examples/tools/parity.yaml`` a character
asks a tool for it, from random weights; in ``examples/retool/tiny.yaml`` a program does that the model writes and the
sandbox runs, by a model that calls the interpreter once in eight times. A run ends when the job's goal is reached, or
when its steps are used up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.environments import ROOT
from benchmarks.machine import Hardware
from benchmarks.measuring import table, write_results
from benchmarks.rljob_run import rljob_run

HERE = Path(__file__).parent
EXAMPLES = ROOT / "examples"
JOBS = {"parity": EXAMPLES / "tools" / "parity.yaml", "interpreter": EXAMPLES / "retool" / "tiny.yaml"}
MODES: dict[str, dict[str, str]] = {
    "sync": {"pipeline.mode": "sync", "batch.groups": "64"},
    "oneStepOff": {"pipeline.mode": "oneStepOff", "batch.groups": "64"},
    "fullyAsync": {"pipeline.mode": "fullyAsync", "batch.groups": "null"},
}
_REWARD = "validation/held-out/mean@1"


@dataclass(frozen=True, slots=True)
class Learned:
    """One run."""

    mode: str
    seed: int
    first: float
    """Mean reward on the held-out prompts before the first step."""
    last: float
    steps: int
    turns: tuple[float, float]
    """Of an episode, in the first and in the last batch."""
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.tools", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--job", choices=list(JOBS), nargs="+", default=list(JOBS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--mode", choices=list(MODES), nargs="+", default=list(MODES))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    for job in args.job:
        machine = Hardware.here()
        with tempfile.TemporaryDirectory(prefix="rljob-tools-") as scratch:
            settings = {}
            if job == "interpreter":
                model = Path(scratch) / "model"
                subprocess.run([sys.executable, EXAMPLES / "retool" / "cold_start.py", model], check=True)
                settings = {"model.source": str(model)}
            learned = [_run(job, mode, seed, settings, Path(scratch)) for mode in args.mode for seed in args.seeds]
        rows = [
            [one.mode, *map(str, (one.seed, round(one.first, 2), round(one.last, 2), one.steps))] for one in learned
        ]
        for row, one in zip(rows, learned, strict=True):
            row += [f"{one.turns[0]:.2f}", f"{one.turns[1]:.2f}", f"{one.seconds:.0f}"]
        head = ["pipeline", "seed", "reward at first", "at last", "steps", "turns at first", "at last", "seconds"]
        write_results(args.results, job, machine, [asdict(one) for one in learned], table(head, rows))


def _run(job: str, mode: str, seed: int, settings: dict[str, str], scratch: Path) -> Learned:
    run = rljob_run(JOBS[job], scratch / f"{mode}-{seed}", settings={**MODES[mode], **settings, "seed": seed})
    # Before the first step, which the run's rows begin with.
    with (run.folder / "metrics.jsonl").open() as file:
        first = json.loads(file.readline())[_REWARD]
    rewards, turns = [first, *run.column(_REWARD)], run.column("response/turns/mean")
    steps, seconds = run.summary["steps"], run.summary["seconds"]
    learned = Learned(mode, seed, rewards[0], rewards[-1], steps, (turns[0], turns[-1]), seconds)
    print(job, learned, flush=True)
    return learned


if __name__ == "__main__":
    main()
