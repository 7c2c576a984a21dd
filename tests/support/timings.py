"""Where the time of a test run goes: by folder against its budget, the slowest tests, start-up and idle workers.

A plugin of pytest where ``RLJOB_TEST_TIMES`` names a folder, into which it writes what it has counted; started as
`python tests/support/timings.py FOLDER` it prints what all runs of a CI have written there. Budgets are the table of
CONTRIBUTING.md. What exceeds one is said and fails nothing: machines differ.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER, STAGE = "RLJOB_TEST_TIMES", "RLJOB_TEST_STAGE"
SLOWEST = 15
_BUDGET = re.compile(r"^\| `(tests/[\w/]+)` \| (\d+) \|", re.MULTILINE)


def budgets() -> dict[str, int]:
    """Seconds by folder: set-up, test and tear-down of all that is in it, one after the other."""
    return {folder: int(limit) for folder, limit in _BUDGET.findall((ROOT / "CONTRIBUTING.md").read_text())}


def folder_of(test: str, folders: Mapping[str, int]) -> str:
    """The deepest of ``folders`` that a test is in; its own where none has it."""
    file = test.partition("::")[0]
    found = [folder for folder in folders if file.startswith(f"{folder}/")]
    return max(found, key=len, default=file.rpartition("/")[0])


class Timings:
    """Adds up the durations of the tests of one pytest, or of its workers."""

    def __init__(self, folder: Path, stage: str) -> None:
        self._path = folder / f"{stage}-{os.getpid()}.json"
        self._began = time.monotonic()
        self._first: float | None = None
        self._tests: Counter[str] = Counter()
        self._set_up: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self._first is None:
            self._first = max(0.0, time.monotonic() - self._began - report.duration)
        self._tests[report.nodeid] += report.duration
        if report.when != "call":
            self._set_up[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any, config: Any) -> None:
        wall, workers = time.monotonic() - self._began, getattr(config.option, "numprocesses", None) or 1
        counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")}
        start = wall if self._first is None else self._first
        written = {
            "wall": wall, "workers": workers, "start": start, "counts": counts,
            "tests": self._tests, "set-up": self._set_up,
        }  # fmt: skip
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(written))
        terminalreporter.write_line("")
        for line in table([written]):
            terminalreporter.write_line(line)


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Of one or more runs of pytest, as lines."""
    limits, tests, set_up = budgets(), Counter[str](), Counter[str]()
    for run in runs:
        tests.update(run["tests"])
        set_up.update(run["set-up"])
    seconds, prepared = Counter[str](), Counter[str]()
    for test, taken in tests.items():
        seconds[folder_of(test, limits)] += taken
        prepared[folder_of(test, limits)] += set_up[test]
    lines = [f"{'seconds by folder':<44}{'all':>8}{'set-up':>8}{'budget':>8}"]
    for folder, taken in seconds.most_common():
        limit = limits.get(folder)
        over = "  over its budget" if limit is not None and taken > limit else ""
        lines.append(f"{folder:<44}{taken:>8.0f}{prepared[folder]:>8.0f}{'–' if limit is None else limit:>8}{over}")
    lines.append(f"{'start-up and collection':<44}{sum(run['start'] for run in runs):>8.0f}")
    idle = sum(run["workers"] * (run["wall"] - run["start"]) - sum(run["tests"].values()) for run in runs)
    lines.append(f"{'workers between and after tests':<44}{max(0.0, idle):>8.0f}")
    lines += [f"slowest tests{'all':>39}{'set-up':>8}"]
    lines += [f"{taken:>52.1f}{set_up[test]:>8.1f}  {test}" for test, taken in tests.most_common(SLOWEST)]
    return lines


def gathered(folder: Path) -> list[str]:
    """What all stages of a CI have written: the wall time of each, how busy the processors were, then all tests."""
    lines = [f"{'stage':<44}{'seconds':>8}{'busy':>8}"]
    stages = [line.split() for line in (folder / "stages").read_text().splitlines()]
    files = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    for name, seconds, *ticks in stages:
        runs = [run for path, run in files.items() if path.stem.rpartition("-")[0] == name]
        counts = sum((Counter[str](run["counts"]) for run in runs), Counter[str]())
        said = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        lines.append(f"{name:<44}{int(seconds):>8}{_busy(*map(float, ticks)):>8.0%}  {said}".rstrip())
    lines.append(f"{'all stages':<44}{sum(int(seconds) for _, seconds, *_ in stages):>8}")
    return [*lines, *table([*files.values()])]


def _busy(worked: float, idled: float, worked_later: float, idled_later: float) -> float:
    """Which share of the processors' time was used between two looks at their clocks."""
    used = worked_later - worked
    return used / max(1.0, used + idled_later - idled)


if __name__ == "__main__":
    print("\n".join(gathered(Path(sys.argv[1]))))
