"""Runs the validation of a job on a model: the job's own, another one, or what a run has trained.

Prints one line per data source; --json prints all metrics as one object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rljob_trainer.commands.job_file import add_job_arguments, read_job
from rljob_trainer.errors import JobFileError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="PATH", help="a Hugging Face folder or hub id instead of the job's model")
    which.add_argument(
        "--run", metavar="DIR", help="output folder of a run or address of its state, or one of its checkpoints"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="with --run: the checkpoint of step N (default: the newest)"
    )
    parser.add_argument("--json", action="store_true", help="print all metrics as JSON")


def run(args: argparse.Namespace) -> int:
    if args.model is not None:
        args.set += ["model.random=null", f"model.source={json.dumps(str(Path(args.model).absolute()))}"]
    job, base = read_job(args)
    if not job.spec.data.validation:
        raise JobFileError(f"{args.file} has no spec.data.validation; say there what to evaluate on")
    import asyncio

    from rljob_trainer.driver.evaluation import evaluate

    metrics = asyncio.run(evaluate(job, base, run=args.run, step=args.step, report=_report))
    if args.json:
        print(json.dumps(metrics, indent=1))
        return 0
    for name, value in metrics.items():
        print(f"{name:<50} {value:.4g}")
    return 0


def _report(text: str) -> None:
    print(text, file=sys.stderr)
