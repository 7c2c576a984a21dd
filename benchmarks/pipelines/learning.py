"""Does each pipeline learn what lockstep learns? The quick start and its twins, with the same number of samples.

    .venv/bin/python -m benchmarks.pipelines.learning                 # three seeds of six schedules, about 50 minutes

The twins (``examples/pipelines``) differ from the quick start in their schedule alone. Each goes over the same number
of steps and samples, without the early end that the quick start has. The reward is that of the last validation: the
share of exact answers on held-out problems. Runs that the results' file has already, with as many steps, are kept.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.environments import ROOT
from benchmarks.machine import Hardware
from benchmarks.measuring import table, write_results
from benchmarks.rljob_run import rljob_run

HERE = Path(__file__).parent
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
TWINS = ROOT / "examples" / "pipelines"
MODES = ("sync", "one-step-off", "stale-samples", "partial-rollout", "stream", "on-policy")
REWARD = "validation/held-out/mean@1"
GOAL = 0.03


@dataclass(frozen=True, slots=True)
class Learnt:
    """One run of one schedule."""

    mode: str
    seed: int
    steps: int
    reward: float
    """On held-out problems after the last step."""
    samples: int
    mean_age: float
    seconds: float
    """Of training, start and end of the command apart."""


def learn(mode: str, seed: int, steps: int) -> Learnt:
    """Trains to the end."""
    settings = {"seed": seed, "model.random.seed": seed, "stop.reward": "null", "checkpoint.everySteps": 0}
    overlays = [] if mode == "sync" else [TWINS / f"{mode}.yaml"]
    with tempfile.TemporaryDirectory() as folder:
        run = rljob_run(QUICKSTART, Path(folder, "run"), overlays=overlays, steps=steps, settings=settings)
        return Learnt(
            mode=mode,
            seed=seed,
            steps=len(run.rows),
            reward=run.column(REWARD)[-1],
            samples=round(run.column("progress/groups")[-1]) * 2,
            mean_age=fmean(run.column("age/mean")),
            seconds=run.column("progress/seconds")[-1],
        )


def show(learnt: Sequence[Learnt]) -> str:
    """A row per schedule."""
    sync = [run.reward for run in learnt if run.mode == "sync"]
    rows = []
    for mode in MODES:
        runs = [run for run in learnt if run.mode == mode]
        if not runs:
            continue
        reward = fmean(run.reward for run in runs)
        rows.append(
            [
                mode,
                ", ".join(f"{run.reward:.3f}" for run in runs),
                f"{reward:.3f}",
                f"{reward - fmean(sync):+.3f}" if sync else "",
                f"{fmean(run.mean_age for run in runs):.2f}",
                ", ".join(str(run.samples) for run in runs),
                f"{fmean(run.seconds for run in runs):.0f}",
            ]
        )
    head = ["schedule", "reward by seed", "mean", "over sync", "mean age", "samples", "training s"]
    return f"Held-out reward (share of exact answers) at the end. Goal: within {GOAL} of sync.\n\n{table(head, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    machine, file = Hardware.here(), arguments.results / "learning.json"
    known = [Learnt(**run) for run in json.loads(file.read_text())["results"]] if file.exists() else []
    learnt = [run for run in known if run.steps == arguments.steps]
    for seed in arguments.seeds:
        for mode in arguments.modes:
            if any((run.mode, run.seed) == (mode, seed) for run in learnt):
                continue
            learnt.append(learn(mode, seed, arguments.steps))
            print(learnt[-1], flush=True)
            learnt.sort(key=lambda run: (MODES.index(run.mode), run.seed))
            write_results(arguments.results, "learning", machine, learnt, show(learnt))


if __name__ == "__main__":
    main()
