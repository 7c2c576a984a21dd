"""Lists every mistake in a job file without starting anything.

Each line reads `path: what is wrong; what to do`. For a valid job, lines that begin with `note:` point out settings
with surprising effects. The exit code is 0 if the job is valid, otherwise 64, the same as when a run refuses it.
Files and data that a job refers to are checked too, unless --schema-only is given; paths are relative to the job file.
If rljob is installed without its extra trainer, they cannot be checked; the command says so, and the exit code covers
only the rest. They are checked even if the job file itself has mistakes, except for what depends on a value of the
wrong type (a mistake in one item of a list hides the other items). In JSON Lines files over 64 MB only the first 4096
rows and the last one are checked. Lengths are compared with the context of random models, local folders and hub ids in
this machine's Hugging Face cache; for other models, the run does this before it starts anything.
A job file does not say where it will run: use --cluster for one that will be applied to a cluster.
Several files are one job and its overlays, as for rljob run. To check several jobs, call the command for each, or put
them into one file, separated by ---.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rljob_api import Checked, JobInvalid, Readable, Violation, check_text, read_overlay, resolve
from rljob_api.loading import read_text
from rljob_api.memory import ModelShape
from rljob_api.notes import notes
from rljob_api.on_cluster import cluster_notes, refused
from rljob_api.resolved import ResolvedJob
from rljob_api.yaml_reading import MAX_CHARACTERS
from rljob_trainer.errors import JobFileError

INVALID = JobFileError.exit_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="job file (- reads standard input)")
    parser.add_argument(
        "overlays", metavar="OVERLAY", nargs="*", help="files applied to the job as overrides, in order"
    )
    parser.add_argument(
        "--schema-only", action="store_true", help="check only the job file, not the files and data it refers to"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="check the job with this override (repeatable)"
    )
    parser.add_argument(
        "--cluster", action="store_true", help="also report what the operator refuses and what cannot work in pods"
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing for a valid job")


def run(args: argparse.Namespace) -> int:
    lacking: list[ModuleNotFoundError] = []
    outcomes = list[Checked]()
    found = _violations(args.file, args.set, args.schema_only, args.overlays, lacking, outcomes)
    jobs = [resolve(outcome.job) for outcome in outcomes if outcome.job is not None]
    if args.cluster:
        found += [
            (_place(args.file, outcome, violation), violation)
            for outcome in outcomes
            if outcome.job is not None
            for violation in refused(resolve(outcome.job))
        ]
    for place, violation in found:
        print(f"{place}: " if len(outcomes) > 1 and place else "", violation, sep="")
    if not found and not args.quiet:
        print(f"{' + '.join([args.file, *args.overlays])}: valid{' by itself' if lacking else ''}")
        for job in jobs:
            shape = None if args.schema_only or lacking else _shape(job, args.file)
            for note in [*notes(job, shape), *(cluster_notes(job) if args.cluster else ())]:
                print(f"note: {note}")
    if lacking:
        print(
            "rljob validate: files and data that the job refers to were not checked: the module "
            f"{lacking[0].name} is not installed; install the extra trainer: pip install 'rljob[trainer,cpu]'",
            file=sys.stderr,
        )
    return INVALID if found else 0


def _violations(
    file: str,
    assignments: list[str],
    schema_only: bool,
    overlays: list[str],
    lacking: list[ModuleNotFoundError],
    outcomes: list[Checked],
) -> list[tuple[str | None, Violation]]:
    """What is wrong with the file, overlays laid over it, with file and line. No line: it is about the file as a whole,
    which the violation itself names, or about several files laid over one another.
    ``lacking`` gets what kept the files that the job names from being looked at, ``outcomes`` the jobs."""
    name = "standard input" if file == "-" else file
    try:
        patches = [read_overlay(Path(overlay)) for overlay in overlays]
        text = sys.stdin.read(MAX_CHARACTERS + 1) if file == "-" else read_text(Path(file))
    except OSError as problem:
        return [(None, Violation(str(problem.filename), f"cannot be read ({problem.strerror})", "check the path"))]
    except JobInvalid as problem:
        return [(None, violation) for violation in problem.violations]
    except UnicodeDecodeError as problem:
        return [(None, Violation(name, f"is not UTF-8 text (byte {problem.start})", "save it as UTF-8"))]
    found: list[tuple[str | None, Violation]] = []
    outcomes += check_text(text, assignments, patches, name)
    for outcome in outcomes:
        violations = list(outcome.violations)
        if outcome.readable is not None and not schema_only:
            said = {violation.path for violation in violations}
            try:
                violations += [v for v in _beyond_the_schema(outcome.readable, file) if v.path not in said]
            except ModuleNotFoundError as problem:
                if (problem.name or "").startswith("rljob_"):
                    raise  # no extra brings what is ours
                lacking.append(problem)
        found += [(_place(file, outcome, violation), violation) for violation in violations]
    return found


def _place(file: str, outcome: Checked, violation: Violation) -> str | None:
    return f"{file}:{outcome.document.line_of(violation.parts)}" if outcome.document else None


def _shape(job: ResolvedJob, file: str) -> ModelShape | None:
    """Of the model's files, as far as they are on this machine and of a family that is known."""
    from rljob_trainer.commands.memory import described

    try:
        found = described(job, _folder_of(file))
    except JobFileError:
        return None
    return None if found is None else found[0]


def _folder_of(file: str) -> Path:
    return Path.cwd() if file == "-" else Path(file).resolve().parent


def _beyond_the_schema(found: Readable, file: str) -> list[Violation]:
    from rljob_trainer.preflight import preflight

    folder = _folder_of(file)
    return preflight(found, base=folder, code=[folder])
