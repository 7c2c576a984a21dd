"""`python -m benchmarks.malformed`: makes malformed input by chance, and says what became of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import Hardware
from benchmarks.malformed import data_files, models, rewards

RESULTS = Path(__file__).parent / "results"
BATCH = 50
"""Cases that are made from one seed: after each of them there is a line, and a long run can be watched."""


def _inputs(kind: Any, count: int, first_seed: int) -> dict[str, Any]:
    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    faults: list[str] = []
    for done in range(0, count, BATCH):
        records = kind.run(min(BATCH, count - done), seed=first_seed + done // BATCH)
        for record in records:
            outcomes[record.kind][record.outcome] += 1
            if record.outcome == kind.FAULT:
                faults.append(str(record))
        print(f"{done + len(records)} of {count}, {len(faults)} faults", flush=True)
    return {
        "count": count,
        "first seed": first_seed,
        "outcomes": {name: dict(sorted(found.items())) for name, found in sorted(outcomes.items())},
        "faults": faults,
    }


def _functions(count: int, seed: int) -> dict[str, Any]:
    return {"seed": seed, **rewards.summary(rewards.run(count, seed))}


def _jobs(count: int, first_seed: int) -> dict[str, Any]:
    """Before a real API server; what disagreed is sorted by what it is about."""
    # An API server is needed for these alone.
    from benchmarks.malformed import jobs
    from benchmarks.malformed.jobs.topics import topic
    from benchmarks.operator.plane import fresh_plane

    outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    alone, topics = Counter[str](), Counter[str]()
    faults: list[str] = []
    with fresh_plane() as (plane, _):
        for done in range(0, count, BATCH):
            records = jobs.run(plane, min(BATCH, count - done), seed=first_seed + done // BATCH)
            for record in records:
                outcomes[record.kind][record.outcome] += 1
                if record.outcome == jobs.ALONE:
                    alone.update([record.says])
                elif record.outcome == jobs.FAULT:
                    faults.append(str(record))
                    topics.update([topic(record.mistakes[-1])] if len(record.mistakes) == 1 else [])
            print(f"{done + len(records)} of {count}, {len(faults)} faults", flush=True)
    return {
        "count": count,
        "first seed": first_seed,
        "outcomes": {name: dict(sorted(found.items())) for name, found in sorted(outcomes.items())},
        "refused by validate alone, by rule": dict(alone.most_common()),
        "faults by topic": dict(topics.most_common()),
        "faults": faults,
    }


KINDS: dict[str, tuple[Callable[[int, int], dict[str, Any]], int]] = {
    "data_files": (lambda count, seed: _inputs(data_files, count, seed), 2000),
    "jobs": (_jobs, 5000),
    "models": (lambda count, seed: _inputs(models, count, seed), 1000),
    "rewards": (_functions, 1000),
}
"""What makes the cases of a kind and looks at them, and how many are made by default."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.malformed", description=__doc__)
    parser.add_argument("--only", choices=KINDS, action="append", help="one kind (repeatable); default: all")
    parser.add_argument("--count", type=int, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=28, help="the first seed")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for name in options.only or KINDS:
        make, count = KINDS[name]
        print(f"{name}:", flush=True)
        result = {"commit": Hardware.here().commit, **make(options.count or count, options.seed)}
        (options.output / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        wrong += len(result.get("faults", result.get("wrong", ())))
        print(json.dumps(result["outcomes"], indent=1), flush=True)
    print(f"{wrong} cases ended otherwise than by a right result or a sentence that names what is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
