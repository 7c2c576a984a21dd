"""Predicts a job's step time, idle time, sample age and device-hours for its own and other pool sizes, or its memory.

The real schedule and loop run in virtual time with simulated engines and trainer. A plan needs timings: either from a
sync run (--measured), or how long the job's engines take to generate one batch with nothing else to do (--generation)
and how long its ranks take to train on one (--training). Prefill, rewards and validation are not included.

  rljob plan job.yaml --measured runs/a-few-steps-of-sync
  rljob plan job.yaml --generation 180 --training 113 --lengths exponential:3000

With --memory it predicts the peak memory of each GPU instead, part by part, from the job and the model's shape. If
something does not fit, it suggests a change that makes it fit.

  rljob plan job.yaml --memory --gpu-memory 80Gi
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.commands.job_file import add_job_arguments, load_job
from rljob_trainer.commands.memory import add_memory_arguments, as_json, as_text, planned
from rljob_trainer.errors import JobFileError

if TYPE_CHECKING:
    from rljob_trainer.simulation.lengths import LengthDistribution
    from rljob_trainer.simulation.planning import PlanRow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    parser.add_argument("--measured", metavar="DIR", type=Path, help="output folder of a sync run to take timings from")
    parser.add_argument(
        "--generation", type=_seconds, metavar="S", help="seconds to generate one batch with nothing else running"
    )
    parser.add_argument(
        "--training", type=_seconds, metavar="S", help="seconds to train on one batch with nothing else running"
    )
    parser.add_argument("--publication", type=_seconds, metavar="S", help="seconds that engines pause for new weights")
    parser.add_argument(
        "--lengths",
        metavar="WHAT",
        help="response lengths: exponential:MEAN, lognormal:MEDIAN,SIGMA, a file with one length per line, or a run's "
        "output folder (default: the run of --measured, else exponential with a mean of maxResponseTokens / 10)",
    )
    parser.add_argument(
        "--saturation",
        type=_seconds,
        metavar="N",
        help="running sequences at which an engine's decoding step takes twice as long as with none (default: 256)",
    )
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps to simulate (default: 40)")
    add_memory_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    job = load_job(args)
    if args.memory:
        memory, origin = planned(job, args.file.resolve().parent, args.gpu_memory, args.model, args.critic_model)
        print((as_json if args.json else as_text)(memory, job, origin))
        return 0
    # Simulating needs numpy, which `rljob plan --help` should not wait for.
    from rljob_trainer.simulation.lengths import Exponential, parse_lengths
    from rljob_trainer.simulation.measured import measure
    from rljob_trainer.simulation.planning import DEFAULT_SATURATION, PlannedSeconds, Planner, calibrated, plan

    if args.steps < 4:
        raise JobFileError(f"--steps {args.steps} covers only the start-up; use 4 or more")
    limit, n = job.spec.rollout.max_response_tokens, job.spec.batch.samples_per_prompt
    lengths: LengthDistribution = Exponential(max(1.0, limit / 10), limit)
    measured_job = job
    if args.measured is not None:
        measured = measure(args.measured)
        measured_job, lengths, seconds = measured.job, measured.lengths, measured.seconds
    elif args.generation is not None and args.training is not None:
        seconds = PlannedSeconds(args.generation, args.training, args.publication or 0.0)
    else:
        raise JobFileError("plan needs timings: pass --measured DIR, or --generation S and --training S")
    if args.lengths is not None:
        lengths = parse_lengths(args.lengths, limit=limit, n=n)
    speeds = calibrated(measured_job, lengths, seconds, args.saturation or DEFAULT_SATURATION)
    rows = plan(Planner(job, lengths, speeds), args.steps)
    print(_as_json(rows, lengths) if args.json else _as_text(rows, lengths, job.spec.batch.groups))
    return 0


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _as_json(rows: list[PlanRow], lengths: LengthDistribution) -> str:
    return json.dumps({"lengths": lengths.describe(), "rows": [asdict(row) for row in rows]}, indent=1)


_COLUMNS = ("", "mode", "pools", "step s", "limit", "trainer idle", "engines idle", "age", "oldest", "partial", "hours")


def _as_text(rows: list[PlanRow], lengths: LengthDistribution, groups: int) -> str:
    best = min(range(len(rows)), key=lambda i: rows[i].forecast.step_seconds)
    cells = [_COLUMNS, *(_cells(row, index, best) for index, row in enumerate(rows))]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS))]
    table = "\n".join(
        "  ".join(
            text.ljust(w) if i < 3 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )
    gain = rows[0].forecast.step_seconds / rows[best].forecast.step_seconds
    verdict = (
        "The job's own split is the fastest of these."
        if best == 0
        else f"{rows[best].split} in mode {rows[best].mode} takes {1 / gain:.0%} of the job's time."
    )
    return (
        f"responses: {lengths.describe()}; a step trains {groups} prompt groups\n\n{table}\n\n{verdict}\n"
        "pools: rollout devices : trainer devices. limit: time of the slower stage alone. age: versions, mean of the\n"
        "oldest tokens. partial: groups made by more than one version. hours: device-hours per 100 steps."
    )


def _cells(row: PlanRow, index: int, best: int) -> tuple[str, ...]:
    forecast = row.forecast
    return (
        "job" if index == 0 else "best" if index == best else "",
        row.mode,
        str(row.split),
        f"{forecast.step_seconds:.3g}",
        f"{row.limit_seconds:.3g}",
        f"{forecast.trainer_idle:.0%}",
        f"{forecast.engines_idle:.0%}",
        f"{forecast.mean_age:.2f}",
        f"{forecast.max_age}",
        f"{forecast.partial_share:.0%}",
        f"{100 * row.device_hours_per_step:.3g}",
    )
