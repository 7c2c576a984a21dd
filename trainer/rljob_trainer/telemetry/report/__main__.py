"""``python -m rljob_trainer.telemetry.report FOLDER``: writes the report of a run again and prints its path."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rljob_trainer.errors import RLJobError
from rljob_trainer.telemetry.report import write_report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rljob_trainer.telemetry.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="output folder of a run")
    try:
        print(write_report(parser.parse_args().folder))
    except RLJobError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
