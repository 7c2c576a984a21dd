"""Says everything that is wrong with job files, without starting anything.

Each line reads `path: what is wrong; what to do`. The exit code is 0 when all files are valid, else 2.
Files and data that a job names are looked at too, unless --schema-only is given; relative paths start at the job file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rljob_api import RLJob, Violation, check_text

INVALID = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="job file (- reads standard input)")
    parser.add_argument("--schema-only", action="store_true", help="look at the job files alone, not at what they name")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="check with this change; may be repeated"
    )
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing about valid files")


def run(args: argparse.Namespace) -> int:
    several = len(args.files) > 1
    invalid = 0
    for file in args.files:
        found = list(_violations(file, args.set, args.schema_only))
        for line, violation in found:
            named = not several or violation.path == file
            print("" if named else f"{file}:{line}: " if line else f"{file}: ", violation, sep="")
        if found:
            invalid += 1
        elif not args.quiet:
            print(f"{file}: valid")
    return INVALID if invalid else 0


def _violations(file: str, assignments: list[str], schema_only: bool) -> list[tuple[int | None, Violation]]:
    """What is wrong with one file, with the line where that can be told."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as problem:
        return [(None, Violation(file, f"cannot be read ({problem.strerror})", "check the path"))]
    except UnicodeDecodeError as problem:
        return [(None, Violation(file, f"is not UTF-8 text (byte {problem.start})", "save it as UTF-8"))]
    found: list[tuple[int | None, Violation]] = []
    for outcome in check_text(text, assignments):
        violations = list(outcome.violations)
        if outcome.job is not None and not violations and not schema_only:
            violations = _preflight(outcome.job, file)
        found += [(outcome.document.line_of(v.parts) if outcome.document else None, v) for v in violations]
    return found


def _preflight(job: RLJob, file: str) -> list[Violation]:
    from rljob_trainer.preflight import preflight

    folder = Path.cwd() if file == "-" else Path(file).resolve().parent
    return preflight(job, base=folder, code=[folder])
