"""What the verbs that work on one job have in common: reading it, with changes, checked against files and data.

Relative paths in a job file start at the folder of that file, so that a job means the same from wherever it is run;
those in overlays start there too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rljob_api import JobInvalid, Readable, RLJob, load_jobs, resolve
from rljob_api.resolved import ResolvedJob
from rljob_trainer.errors import JobFileError
from rljob_trainer.preflight import preflight


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """FILE, OVERLAY and --set."""
    parser.add_argument("file", metavar="FILE", type=Path, help="job file")
    parser.add_argument(
        "overlays",
        metavar="OVERLAY",
        type=Path,
        nargs="*",
        help="files with fields to override, applied to the job in order: maps are merged, null removes a field, "
        "lists and values are replaced",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="override a field of the job (repeatable)"
    )


def load_job(args: argparse.Namespace) -> ResolvedJob:
    """The job, everything filled in; the files that it names are not looked at.

    Raises ``JobInvalid`` with all that is wrong, and ``JobFileError`` when a file cannot be read or does not hold
    exactly one job.
    """
    return resolve(_one_job(args))


def read_job(args: argparse.Namespace) -> tuple[ResolvedJob, Path]:
    """The job, everything filled in, and the folder that its relative paths start from.

    Raises ``JobInvalid`` with all that is wrong with the job, its data and its model, and ``JobFileError`` as
    ``load_job`` does.
    """
    base = args.file.resolve().parent
    return checked_job(_one_job(args), base, code=[base]), base


def checked_job(job: RLJob, base: Path, code: Sequence[Path]) -> ResolvedJob:
    """A valid job against its files, and everything filled in. Raises ``JobInvalid``."""
    violations = preflight(Readable(job), base=base, code=code)
    if violations:
        raise JobInvalid(violations)
    return resolve(job)


def _one_job(args: argparse.Namespace) -> RLJob:
    try:
        jobs = load_jobs(args.file, args.set, args.overlays)
    except OSError as problem:
        raise JobFileError(f"{problem.filename} cannot be read ({problem.strerror}); check the path") from None
    if len(jobs) != 1:
        raise JobFileError(f"{args.file} contains {len(jobs)} jobs; put the one to run into its own file")
    return jobs[0]
