"""Trains a job on this machine with a local Ray, without Kubernetes.

The output folder holds the resolved job, metrics.jsonl, summary.json, report.html, samples and checkpoints. (If
checkpoint.uri is a bucket, the checkpoints are there, with copies of the rest.) To continue a run that was stopped or
killed, run the same command again. On Ctrl-C, SIGTERM or a closed terminal (except with nohup), the run writes a
checkpoint if a step has been completed, and exits within ten seconds; a second Ctrl-C exits at once.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api import JobInvalid
from rljob_trainer.commands.job_file import add_job_arguments, read_job
from rljob_trainer.commands.places import on_this_machine
from rljob_trainer.errors import JobFileError
from rljob_trainer.storage import is_address

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedJob


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    parser.add_argument(
        "--output", "-o", metavar="DIR", type=Path, help="output folder (default: checkpoint.uri or runs/<job's name>)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="stop after N steps (a later run continues)")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto (default): continue the run in the output folder; never: start over and set the old run aside; "
        "PATH: start from this checkpoint, or from the last one of this run (also s3://...)",
    )
    parser.add_argument(
        "--status-port",
        type=int,
        metavar="PORT",
        help="serve status and metrics on this port of the loopback device (`rljob status http://127.0.0.1:PORT`)",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="with --status-port: calls need this token and may send commands",
    )
    parser.add_argument("--plain", action="store_true", help="print one line per step, even on a terminal")


def run(args: argparse.Namespace) -> int:
    if args.steps is not None and args.steps < 1:
        raise JobFileError(f"--steps {args.steps} is too small; use 1 or more")
    if args.status_port is not None and not 0 <= args.status_port <= 65535:
        raise JobFileError(f"--status-port {args.status_port} is not a port; use 0 (any free port) to 65535")
    if not args.resume:
        raise JobFileError("--resume is empty; pass auto, never, or the path of a checkpoint or a run")
    if args.token_file is not None and args.status_port is None:
        raise JobFileError("--token-file has no effect without --status-port; add it, or remove --token-file")
    job, base = _job(args)
    print(f"{job.metadata.name}: valid; loading PyTorch and Ray", flush=True)  # which takes seconds
    import asyncio

    from rljob_trainer.control.http import Listening, read_token
    from rljob_trainer.driver.run import RunOptions, run_job
    from rljob_trainer.telemetry.logs import logs_shown
    from rljob_trainer.telemetry.open_view import open_view

    places = on_this_machine(job, args.output, base)
    options = RunOptions(
        places.output, base, args.resume, restore=_restore(job, base), state=places.state, steps=args.steps
    )
    if args.status_port is not None:
        token = None if args.token_file is None else read_token(args.token_file)
        options = replace(options, listening=Listening(args.status_port, token=token))
    with open_view(plain=True if args.plain else None) as view, logs_shown(view, job.spec.logging.level):
        return asyncio.run(run_job(job, options, view)).exit_code


def _restore(job: ResolvedJob, base: Path) -> str | None:
    if job.spec.restore is None:
        return None
    place = job.spec.restore.from_
    return place if is_address(place) else str(base / Path(place).expanduser())


def _job(args: argparse.Namespace) -> tuple[ResolvedJob, Path]:
    """The job as it is written; with ``--steps`` for its own end where that comes before, or where it has none."""
    if args.steps is not None:
        with suppress(JobInvalid):  # an end may be what it lacks
            job, base = read_job(args)
            if job.spec.stop.steps is not None and args.steps <= job.spec.stop.steps:
                return job, base
        args.set.append(f"stop.steps={args.steps}")
    return read_job(args)
