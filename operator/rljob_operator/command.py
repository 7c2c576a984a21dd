"""The console command `rljob-operator`. The base wheel has it, too, and without the extra `operator` it says so."""

from __future__ import annotations

import sys

LACKING = 64
"""The exit code where a module is missing."""


def main() -> int:
    """Runs the operator with the command line's arguments; returns the exit code."""
    try:
        from rljob_operator.__main__ import main as run
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("rljob_"):
            raise  # no extra brings what is ours
        print(
            f"rljob-operator: the module {missing.name} is not installed; install the extra operator: pip install "
            "'rljob[operator]'",
            file=sys.stderr,
        )
        return LACKING
    return run()
