"""What a CI ends with: below all tables, which stages failed and with what, and which tests are unsteady.

Started as `python tests/support/verdict.py FOLDER [FILE]`, with the folder that the stages have written into
(``RLJOB_TEST_TIMES``); FILE gets the line of this run for `benchmarks/ci/runs.jsonl`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import again
from timings import Stage, stages

ROOT = Path(__file__).parents[2]
ERROR = re.compile(r"^E  |^\S+:\d+:|\berror\b|crashed while running", re.IGNORECASE)
"""A line of pytest, of ruff or mypy, of anybody else, of xdist."""
MAKE_FAILED = re.compile(r"^make(?:\[\d+\])?: \*\*\*", re.MULTILINE)


def failed(stage: Stage) -> bool:
    return stage.code > 0


def last_lines(folder: Path, forgiven: list[again.Unsteady]) -> list[str]:
    """What to look at first comes last."""
    said = [
        f"FAILED stage {stage.name}: {error((folder / f'{stage.name}.log').read_text(errors='replace'))}"
        for stage in stages(folder)
        if failed(stage)
    ]
    for each in forgiven:
        seed = f", seed {each.seed}" if each.seed else ""
        how = f"load {each.load:.1f}{seed}; passed {again.TIMES} times alone; {each.output}"
        said.append(f"UNSTEADY {each.test}: {each.error} ({how})")
    return said


def error(log: str) -> str:
    """Of a failed stage: the first line that looks like one, before make says that something failed."""
    before = MAKE_FAILED.split(log, maxsplit=1)[0]
    lines = [line.rstrip() for line in before.splitlines() if line.strip()]
    raised = [line for line in lines if line.startswith("E  ")] or [line for line in lines if ERROR.search(line)]
    return next(iter([*raised, *lines[-1:]]), "it printed nothing").removeprefix("E  ").strip()


def line_of(folder: Path, forgiven: list[again.Unsteady]) -> dict[str, Any]:
    """Of `benchmarks/ci/runs.jsonl`."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ran = stages(folder)
    seconds = sum(stage.seconds for stage in ran)
    return {
        "commit": commit.strip(),
        "at": datetime.now(UTC).isoformat(timespec="minutes"),
        "seconds": seconds,
        "processor_seconds": round(sum(stage.processor_seconds for stage in ran)),
        "processors": os.cpu_count(),
        "load": round(sum(stage.load * stage.seconds for stage in ran) / max(1, seconds), 1),
        "failed": [stage.name for stage in ran if failed(stage)],
        "unsteady": [each.test for each in forgiven],
        "stages": {stage.name: [stage.seconds, round(stage.processor_seconds)] for stage in ran},
    }


if __name__ == "__main__":
    counted, forgiven = Path(sys.argv[1]), again.read(Path(os.environ[again.FOLDER]))
    for each in forgiven:
        print(f"\n{Path(each.output).read_text()}")
    for text in last_lines(counted, forgiven):
        print(text)
    for file in sys.argv[2:]:
        Path(file).write_text(json.dumps(line_of(counted, forgiven)) + "\n")
