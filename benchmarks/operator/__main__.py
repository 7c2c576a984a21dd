"""The operator against a bare client and a kopf `on.create` operator, its latency, its rest and its polling.

.venv/bin/python -m benchmarks.operator
"""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, interleaved, ratios, table, write_results
from benchmarks.operator.measures import (
    Burst,
    bare_burst,
    bare_latencies,
    latencies,
    many,
    operator_burst,
    polling,
    probe_burst,
)

HERE = Path(__file__).parent
GOALS = {"rate": 0.7, "memory": 200, "latency": 0.050, "probe": 1.5, "many": 0.7, "many memory": 400, "idle": 0.02}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operator", description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--only", choices=("latency", "crowds"), help="one of the two tables; default: both")
    parser.add_argument("--jobs", type=int, default=1000, help="jobs that wait at start")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--posts", type=int, default=200, help="jobs that are posted one after the other")
    parser.add_argument("--many", type=int, default=5000, help="jobs of the large burst")
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--polled", type=int, default=1000, help="running jobs")
    parser.add_argument("--poll-seconds", type=float, default=10.0)
    parser.add_argument("--polling-seconds", type=float, default=60.0)
    args = parser.parse_args()
    if args.only != "crowds":
        _latency(args)
    if args.only != "latency":
        _crowds(args)


def _latency(args: argparse.Namespace) -> None:
    """One job at a time: `results/latency.md`."""
    machine = Hardware.here(("kopf", "kubernetes", "aiohttp", "pydantic"))
    sides = {"operator": lambda _: latencies(args.posts), "bare": lambda _: bare_latencies(args.posts)}
    found = {name: sorted(chain.from_iterable(runs)) for name, runs in interleaved(sides, args.repetitions).items()}
    rows = [[name, *(f"{value:.0f}" for value in _milliseconds(seconds))] for name, seconds in found.items()]
    text = "\n".join(
        [
            "# From the POST of a job to its RayCluster",
            "",
            f"{args.repetitions} times {args.posts} jobs, one after the other; milliseconds.",
            f"The bare client makes the same writes. Goal: p95 < {GOALS['latency'] * 1e3:.0f}.",
            "",
            table(["", "p50", "p90", "p95"], rows),
        ]
    )
    write_results(args.output, "latency", machine, found, text)


def _crowds(args: argparse.Namespace) -> None:
    """Many jobs: `results/operator.md`."""
    machine = Hardware.here(("kopf", "kubernetes", "aiohttp", "pydantic"))
    results: dict[str, Any] = {}
    sides = {"bare": bare_burst, "operator": operator_burst, "probe": probe_burst}
    bursts = interleaved({name: lambda _, side=side: side(args.jobs) for name, side in sides.items()}, args.repetitions)
    results["bursts"] = bursts
    print(f"{args.many} jobs", flush=True)
    burst, rest = many(args.many, args.idle_seconds)
    results |= {"many": burst, "rest": rest}
    print(f"{args.polled} running jobs", flush=True)
    polled = polling(args.polled, args.poll_seconds, args.polling_seconds)
    results["polling"] = polled

    rates = {name: [one.rate for one in side] for name, side in bursts.items()}
    ours = MeasuredSpread.of(rates["operator"])
    against = {name: MeasuredSpread.of(ratios(rates["operator"], rates[name])) for name in ("bare", "probe")}
    large = burst.rate / ours.median
    rows = [
        ["of the bare client's rate", against["bare"].show(), f">= {GOALS['rate']}"],
        ["of the kopf operator's rate", against["probe"].show(), f">= {GOALS['probe']}"],
        [f"peak memory with {args.jobs} jobs, MB", _megabytes(bursts["operator"]).show(".0f"), f"< {GOALS['memory']}"],
        [f"rate with {args.many} jobs over {args.jobs}", f"{large:.2f}", f">= {GOALS['many']}"],
        [f"peak memory with {args.many} jobs, MB", f"{rest.peak_bytes / 1e6:.0f}", f"< {GOALS['many memory']}"],
        [f"idle with {args.many} jobs, share of a core", f"{rest.core_share:.1%}", f"< {GOALS['idle']:.0%}"],
        [
            f"{polled.jobs} running jobs asked every {polled.wanted_seconds:g} s: p50, p95, longest, s",
            ", ".join(f"{value:.1f}" for value in polled.intervals),
            "",
        ],
        ["stored progress behind, median, s", f"{polled.progress_lag:.0f}", ""],
        ["polling, share of a core", f"{polled.core_share:.0%}", ""],
        ["peak memory when polling, MB", f"{polled.peak_bytes / 1e6:.0f}", ""],
    ]
    text = "\n".join(
        [
            "# The operator's speed",
            "",
            f"{args.jobs} RLJobs that wait at start; each gets its objects and its status.",
            "",
            table(
                ["", "jobs/s", "s from the first write to the last", "s from the process's start", "peak MB"],
                [_row(name, side) for name, side in bursts.items()],
            ),
            table(["", "measured", "goal"], rows),
        ]
    )
    write_results(args.output, "operator", machine, results, text)


def _row(name: str, side: list[Burst]) -> list[str]:
    starts = [one.from_start for one in side if one.from_start is not None]
    return [
        name,
        MeasuredSpread.of([one.rate for one in side]).show(".0f"),
        MeasuredSpread.of([one.seconds for one in side]).show(".1f"),
        MeasuredSpread.of(starts).show(".1f") if starts else "",
        _megabytes(side).show(".0f") if starts else "",
    ]


def _milliseconds(sorted_seconds: list[float]) -> list[float]:
    """Median, 90th and 95th percentile."""
    return [1e3 * sorted_seconds[int(share * len(sorted_seconds))] for share in (0.5, 0.9, 0.95)]


def _megabytes(side: list[Burst]) -> MeasuredSpread:
    return MeasuredSpread.of([(one.peak_bytes or 0) / 1e6 for one in side])


if __name__ == "__main__":
    main()
