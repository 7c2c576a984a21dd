"""``python -m benchmarks.tools``: does a model learn to use a tool, in every pipeline, with every seed?

The job is ``examples/tools/parity.yaml``: the parity of 16 bits, which a tool tells. A run ends when 97 of 100 held-out
prompts are answered right, or when its steps are used up.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.environments import ROOT
from benchmarks.machine import Hardware
from benchmarks.measuring import table, write_results
from benchmarks.rljob_run import rljob_run

HERE = Path(__file__).parent
JOB = ROOT / "examples" / "tools" / "parity.yaml"
MODES: dict[str, dict[str, str]] = {
    "sync": {},
    "oneStepOff": {"pipeline.mode": "oneStepOff"},
    "fullyAsync": {"pipeline.mode": "fullyAsync", "batch.groups": "null"},
}
_REWARD = "validation/held-out/mean@1"


@dataclass(frozen=True, slots=True)
class Learned:
    """One run."""

    mode: str
    seed: int
    first: float
    """Mean reward of the first validation."""
    last: float
    steps: int
    turns: tuple[float, float]
    """Of an episode, in the first and in the last batch."""
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.tools", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--mode", choices=list(MODES), nargs="+", default=list(MODES))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    learned = []
    for mode in args.mode:
        for seed in args.seeds:
            with tempfile.TemporaryDirectory(prefix="rljob-tools-") as scratch:
                run = rljob_run(JOB, Path(scratch) / "run", settings={**MODES[mode], "seed": seed})
            rewards, turns = run.column(_REWARD), run.column("response/turns/mean")
            seconds = run.summary["seconds"]
            learned.append(
                Learned(mode, seed, rewards[0], rewards[-1], run.summary["steps"], (turns[0], turns[-1]), seconds)
            )
            print(learned[-1], flush=True)
    rows = [[one.mode, *map(str, (one.seed, round(one.first, 2), round(one.last, 2), one.steps))] for one in learned]
    for row, one in zip(rows, learned, strict=True):
        row += [f"{one.turns[0]:.2f}", f"{one.turns[1]:.2f}", f"{one.seconds:.0f}"]
    head = ["pipeline", "seed", "reward at first", "at last", "steps", "turns at first", "at last", "seconds"]
    write_results(args.results, "parity", Hardware.here(), [asdict(one) for one in learned], table(head, rows))


if __name__ == "__main__":
    main()
