"""Trains every case of a study with several seeds, keeps each run's result at once, and writes a table.

    .venv/bin/python -m benchmarks.learning --at-once 2                      # both studies, three seeds: two hours
    .venv/bin/python -m benchmarks.learning --study methods --only grpo rloo --seeds 1
    .venv/bin/python -m benchmarks.learning --show                           # from what is there, without a run

What was measured before is not measured again: the same command goes on where it was stopped. Methods are compared on
the quick start's task, two-digit addition, corrections on copying three digits; ``--task`` takes one for both. Curves
of the corrections: `python docs/algorithms/figures.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.learning.methods import CORRECTIONS, METHODS, SAMPLERS, Case, Study, cases
from benchmarks.learning.runs import GOAL, STEPS, WINDOW, Learned, Task, keep, kept, run
from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, table, write_results

HERE = Path(__file__).parent
STUDIES: tuple[Study, ...] = ("methods", "corrections")
TASKS: Mapping[Study, Task] = {"methods": "addition", "corrections": "copy"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=STUDIES, nargs="+", default=list(STUDIES))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="methods or corrections of these names")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--task", choices=list(STEPS), help="default: addition for methods, copy for corrections")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side (default 1); one takes about a core")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of every process (default 1)")
    parser.add_argument("--show", action="store_true", help="run nothing: the table of what is there")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    for study in arguments.study:
        task: Task = arguments.task or TASKS[study]
        there = learn(cases(study, arguments.seeds, arguments.only), task, arguments)
        if not there:
            continue
        text = show_methods(there) if study == "methods" else show_corrections(there)
        brief = [{k: v for k, v in asdict(one).items() if k not in ("scores", "ages")} for one in there]
        write_results(arguments.results, f"{study}-{task}", Hardware.here(), brief, text)


def learn(wanted: Sequence[Case], task: Task, arguments: argparse.Namespace) -> list[Learned]:
    """What is there of the wanted cases, after those that are missing were run (not with ``--show``)."""
    folder = arguments.results / "runs"

    def one(case: Case) -> None:
        learned = run(case, task, arguments.threads)
        keep(learned, case, task, folder)
        what = f"{case.study}: {case.name}, engines {case.sampler}, seed {case.seed}"
        print(f"{what}: reached {learned.reached}, final {learned.final:.3f}, {learned.seconds:.0f} s", flush=True)

    missing = [] if arguments.show else [case for case in wanted if kept(case, task, folder) is None]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for ended in [pool.submit(one, case) for case in missing]:
            ended.result()
    return [learned for case in wanted if (learned := kept(case, task, folder)) is not None]


def figures(of: Sequence[Learned]) -> list[str]:
    """Seeds that reached the goal, steps to it, final reward, seconds."""
    reached = [float(one.reached) for one in of if one.reached is not None]
    steps = MeasuredSpread.of(reached).show(".0f") if reached else "never"
    final, seconds = MeasuredSpread.of([one.final for one in of]), MeasuredSpread.of([one.seconds for one in of])
    failed = sum(bool(one.failed) for one in of)
    good = f"{len(reached)} of {len(of)}" + (f" ({failed} failed)" if failed else "")
    return [good, steps, final.show(".3f"), seconds.show(".0f")]


HEADER = [f"at {GOAL:.0%}", "steps to it"]
SPREAD = "Median (smallest – largest) over the seeds; a step is 512 sequences."


def show_methods(learned: Sequence[Learned]) -> str:
    rows = []
    for name in METHODS:
        of = [one for one in learned if one.name == name]
        if of:
            rows.append([name, *figures(of)])
    reward = f"Rewards are means of {WINDOW} steps: the share of right characters."
    return f"{SPREAD} {reward}\n\n{table(['method', *HEADER, 'final reward', 'seconds'], rows)}"


def show_corrections(learned: Sequence[Learned]) -> str:
    rows = []
    for sampler in SAMPLERS:
        for name in CORRECTIONS:
            of = [one for one in learned if (one.sampler, one.name) == (sampler, name)]
            if of:
                age = MeasuredSpread.of([sum(one.ages) / max(len(one.ages), 1) for one in of]).median
                rows.append([sampler, name, *figures(of), f"{age:.1f}"])
    score = "Scores are exact answers on held-out problems, by right engines, greedily."
    return (
        f"{SPREAD} {score}\n\n{table(['engines', 'correction', *HEADER, 'final score', 'seconds', 'mean age'], rows)}"
    )


if __name__ == "__main__":
    main()
