"""``python -m benchmarks.kills --moments 200``: kills at random moments over all modes, until so many are on record.

Sync must train the same groups in the same steps as an untouched run, with the same tokens and rewards. The other modes
must have lost nothing, done nothing twice, and kept the bound on age. Each run is written down when it is over
(``results/runs.jsonl``, with its commit), so the same command goes on where it was stopped; remove the file to begin
anew. Two may run at once with ``--results`` and ``--seed`` of their own; their records can be joined line by line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.kills.runs import MODES, VICTIMS, Ended, KilledRunError, Victim, check, run_to_the_end
from benchmarks.machine import Hardware
from benchmarks.measuring import table, write_results

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class KilledRun:
    """One run and what it went through."""

    mode: str
    seed: int
    commit: str
    kills: list[str]
    """Victim and step, in order."""
    rolled_back: int
    """Steps done again."""
    failed: str = ""
    """What was lost, done twice, or broken; empty: nothing."""
    turns: int = 1
    """Of an episode."""


@dataclass
class Killer:
    """Kills runs in a scratch folder."""

    scratch: Path
    commit: str
    turns: int
    whole: dict[int, Ended] = field(default_factory=dict)
    """What became of every prompt of an untouched sync run."""

    def untouched(self) -> None:
        """What sync runs are compared with."""
        run_to_the_end("sync", self.scratch / "whole", [], seed=0, turns=self.turns)
        self.whole = check(self.scratch / "whole" / "output", "sync")

    def run(self, mode: str, victims: Sequence[Victim], seed: int) -> KilledRun:
        """Kills the victims one after the other; a run may end before its last."""
        folder = self.scratch / f"run-{seed}"
        kills: list[str] = []
        try:
            story = run_to_the_end(mode, folder, victims, seed=seed, turns=self.turns)
            kills = story.kills
            states = check(folder / "output", mode, story.undone)
            if mode == "sync" and states != self.whole:
                raise KilledRunError("the ledger differs from that of an untouched run")
        except KilledRunError as error:
            return KilledRun(mode, seed, self.commit, kills or list(victims), 0, str(error), self.turns)
        return KilledRun(mode, seed, self.commit, kills, story.rolled_back, turns=self.turns)


def show(runs: Sequence[KilledRun]) -> str:
    """A row per pipeline."""
    rows = []
    for mode in MODES:
        mine = [run for run in runs if run.mode == mode]
        victims = Counter(kill.partition(" ")[0] for run in mine for kill in run.kills)
        counts = [str(victims[victim]) for victim in VICTIMS]
        again, failed = sum(run.rolled_back for run in mine), sum(bool(run.failed) for run in mine)
        rows.append([mode, str(len(mine)), *counts, str(sum(victims.values())), str(again), str(failed)])
    head = ["pipeline", "runs", *VICTIMS, "kills", "steps done again", "runs that lost something"]
    commits = ", ".join(dict.fromkeys(run.commit for run in runs))
    return f"{table(head, rows)}\nCommits: {commits}."


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.kills", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--moments", type=int, default=200, help="kills on record in the end (default: 200)")
    parser.add_argument("--chain", type=int, default=6, help="kills in one run (default: 6)")
    parser.add_argument("--mode", choices=MODES, action="append", help="only these pipelines")
    parser.add_argument("--turns", type=int, choices=(1, 2), default=1, help="of an episode (default: 1)")
    parser.add_argument("--results", type=Path, help="default: results, or results/two-turns")
    parser.add_argument("--seed", type=int, default=0, help="of the first run on record (default: 0)")
    args = parser.parse_args()
    results = args.results or (HERE / "results" if args.turns == 1 else HERE / "results" / "two-turns")
    record = results / "runs.jsonl"
    results.mkdir(parents=True, exist_ok=True)
    lines = record.read_text().splitlines() if record.exists() else []
    runs = [KilledRun(**json.loads(line)) for line in lines]
    modes, machine = args.mode or list(MODES), Hardware.here()
    with tempfile.TemporaryDirectory(prefix="rljob-kills-") as scratch:
        killer = Killer(Path(scratch), machine.commit, args.turns)
        if "sync" in modes:
            killer.untouched()
        while (left := args.moments - sum(len(run.kills) for run in runs)) > 0:
            seed = max((run.seed + 1 for run in runs), default=args.seed)
            rng = random.Random(seed)
            victims: list[Victim] = [rng.choice(VICTIMS) for _ in range(min(args.chain, left))]
            run = killer.run(modes[seed % len(modes)], victims, seed)
            runs.append(run)
            with record.open("a") as file:
                file.write(json.dumps(asdict(run)) + "\n")
            print(f"{run.mode}: {', '.join(run.kills)}: {run.failed or 'nothing lost'}", flush=True)
    write_results(results, "kills", machine, {"runs": len(runs)}, show(runs))
    return 1 if any(run.failed for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
