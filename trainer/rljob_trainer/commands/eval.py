"""Runs a job's validation on a model: the job's own, another one, or one that a run has trained.

Prints one line per data source; --json prints all metrics as one object. With --model, the job's model.revision and
model.tokenizer are ignored, because the other model has its own tokenizer; set them with --set if needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rljob_api.resolved import ResolvedJob
from rljob_trainer.commands.job_file import add_job_arguments, read_job
from rljob_trainer.errors import JobFileError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--model", metavar="MODEL", help="a Hugging Face folder, hub id or s3:// address instead of the job's model"
    )
    which.add_argument(
        "--run", metavar="DIR", help="output folder of a run, address of its state, or one of its checkpoints"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="with --run: the checkpoint of step N (default: the newest)"
    )
    parser.add_argument("--json", action="store_true", help="print all metrics as JSON")


def run(args: argparse.Namespace) -> int:
    job, base = job_to_evaluate(args)
    names = ", ".join(part.name for part in job.spec.data.validation)
    _report(f"{job.metadata.name}: validation on {names}; loading PyTorch and Ray")  # which takes seconds
    import asyncio

    from rljob_trainer.driver.evaluation import evaluate

    metrics = asyncio.run(evaluate(job, base, run=args.run, step=args.step, report=_report))
    if args.json:
        print(json.dumps(metrics, indent=1))
        return 0
    for name, value in metrics.items():
        print(f"{name:<50} {value:.4g}")
    return 0


def job_to_evaluate(args: argparse.Namespace) -> tuple[ResolvedJob, Path]:
    """The job with the model that was asked for, and the folder that its relative paths start from.

    Raises ``JobInvalid`` and ``JobFileError``.
    """
    if args.model is not None:
        # First, so that what the user sets for this model counts.
        args.set = [*_in_place_of_the_jobs(args.model), *args.set]
    job, base = read_job(args)
    if not job.spec.data.validation:
        raise JobFileError(f"{args.file} has no spec.data.validation; add the data to evaluate on")
    return job, base


def _in_place_of_the_jobs(model: str) -> list[str]:
    """Assignments that put another model into a job."""
    path = Path(model).expanduser()
    if path.exists() or model.startswith((".", "/", "~")):
        # As the user sees it from here; relative paths of the job start at its file.
        model = str(path.absolute())
    others = [f"model.{field}=null" for field in ("random", "revision", "tokenizer")]
    return [*others, f"model.source={json.dumps(model)}"]


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
