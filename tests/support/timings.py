"""What tests cost: processor seconds by stage and by folder, quick tests and slow ones, beside the last record of all.

A plugin of pytest where ``RLJOB_TEST_TIMES`` names a folder, into which it writes what it has counted. Started as
`python tests/support/timings.py FOLDER` it prints what all runs of a CI have written there, and with ``--record`` keeps
it as the record (`make everything`). Processor seconds, since machines of one kind differ more than twofold in seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from processor_time import processor_clock
from slow import is_slow

ROOT = Path(__file__).parents[2]
FOLDER, STAGE = "RLJOB_TEST_TIMES", "RLJOB_TEST_STAGE"
RECORD = ROOT / "benchmarks" / "everything" / "record.json"
DEAREST = 15
COLLECTING = pytest.StashKey[dict[str, float]]()


class Cost(NamedTuple):
    """Of the tests of a folder, or of some of them."""

    tests: int = 0
    processor_seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(self.tests + other.tests, self.processor_seconds + other.processor_seconds)


def folder_of(test: str) -> str:
    """What a test counts for: a folder below tests/, and below tests/trainer/ each of its folders."""
    *folders, _ = test.partition("::")[0].split("/")
    return "/".join(folders[: 3 if folders[:2] == ["tests", "trainer"] else 2])


def configure(config: pytest.Config) -> None:
    """Where the environment names a folder: counts in each process that runs tests, and adds up in the one that others
    report to."""
    if folder := os.environ.get(FOLDER):
        if not getattr(config.option, "numprocesses", None):
            config.pluginmanager.register(Counted(config, processor_clock()))
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Timings(Path(folder), os.environ.get(STAGE, "pytest")))


class Counted:
    """Notes on each report what the processors have done for it since the one before."""

    def __init__(self, config: pytest.Config, clock: Callable[[], float]) -> None:
        self._clock, self._seen = clock, 0.0
        self._collecting: dict[str, float] = getattr(config, "workeroutput", config.stash.setdefault(COLLECTING, {}))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self._seen = self._collecting["collecting"] = self._clock()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        outcome: Any = yield
        now, report = self._clock(), outcome.get_result()
        report.processor_seconds, report.is_slow, report.process = now - self._seen, is_slow(item), os.getpid()
        self._seen = now


class Timings:
    """Adds up what the tests of one pytest, or of its workers, cost, and what collecting them did."""

    def __init__(self, folder: Path, stage: str) -> None:
        self._path = folder / f"{stage}-{os.getpid()}.json"
        self._tests: dict[str, list[Any]] = {}
        """By id: processor seconds, whether it is slow."""
        self._collecting = 0.0

    def pytest_runtest_logreport(self, report: Any) -> None:
        # A worker that has died has noted nothing.
        counted = self._tests.setdefault(report.nodeid, [0.0, getattr(report, "is_slow", False)])
        counted[0] += getattr(report, "processor_seconds", 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self._collecting += getattr(node, "workeroutput", {}).get("collecting", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")}
        collecting = self._collecting + config.stash.get(COLLECTING, {}).get("collecting", 0.0)
        written = {"counts": counts, "collecting": collecting, "tests": self._tests}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(written))
        terminalreporter.write_line("")
        for line in table([written], last_record()):
            terminalreporter.write_line(line)


def last_record() -> dict[str, Any]:
    """Of `make everything`; empty where none is kept."""
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def by_folder(runs: Iterable[dict[str, Any]]) -> dict[str, tuple[Cost, Cost]]:
    """Quick tests and slow ones of each folder."""
    quick, slow = dict[str, Cost](), dict[str, Cost]()
    for run in runs:
        for test, (seconds, again) in run["tests"].items():
            kind, folder = slow if again else quick, folder_of(test)
            kind[folder] = kind.get(folder, Cost()) + Cost(1, seconds)
    return {folder: (quick.get(folder, Cost()), slow.get(folder, Cost())) for folder in sorted({*quick, *slow})}


def table(runs: list[dict[str, Any]], record: dict[str, Any]) -> list[str]:
    """Of one or more runs of pytest, as lines."""
    recorded = {folder: [Cost(*cost) for cost in costs] for folder, costs in record.get("folders", {}).items()}
    of = f"recorded at {record['commit'][:8]}" if record else "nothing is recorded"
    lines = [
        f"{'tests, and their seconds of a processor':<44}{'quick':>14}{'slow':>14}{of:>28}",
        *(
            f"{folder:<44}{_shown(quick)}{_shown(slow)}{''.join(map(_shown, recorded.get(folder, [])))}"
            for folder, (quick, slow) in by_folder(runs).items()
        ),
        f"{'start-up and collection':<44}{'':>6}{sum(run['collecting'] for run in runs):>8.0f}",
        "dearest tests",
    ]
    tests = Counter[str]()
    for run in runs:
        tests.update({test: seconds for test, (seconds, _) in run["tests"].items()})
    return [*lines, *(f"{taken:>58.1f}  {test}" for test, taken in tests.most_common(DEAREST))]


def _shown(cost: Cost) -> str:
    return f"{cost.tests or '–':>6}{cost.processor_seconds:>8.0f}" if cost.tests else f"{'–':>6}{'':>8}"


class Stage(NamedTuple):
    """Of a CI, as `.ci/run` writes it, one a line."""

    name: str
    seconds: int
    processor_seconds: float
    """All that the machine's processors have worked meanwhile."""
    code: int
    """What make ended with; -1: it was cut off, since CI's time was up."""
    load: float
    """Processes that ran or waited for a processor, as a mean of its last minute."""


def stages(folder: Path) -> list[Stage]:
    read = [line.split() for line in (folder / "stages").read_text().splitlines()]
    return [
        Stage(name, int(seconds), (float(later) - float(before)) / 100, int(code), float(load))
        for name, seconds, before, later, code, load in read
    ]


def gathered(folder: Path, record: dict[str, Any]) -> list[str]:
    """What all stages of a CI have written: seconds, processor seconds of the machine, and how their tests ended."""
    lines = [f"{'stage':<44}{'seconds':>14}{'processor':>14}"]
    files = _files(folder)
    ran = stages(folder)
    for name, seconds, worked, *_ in ran:
        runs = [run for path, run in files.items() if path.stem.rpartition("-")[0] == name]
        counts = sum((Counter[str](run["counts"]) for run in runs), Counter[str]())
        said = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        lines.append(f"{name:<44}{seconds:>14}{worked:>14.0f}  {said}".rstrip())
    seconds, worked = sum(stage.seconds for stage in ran), sum(stage.processor_seconds for stage in ran)
    lines.append(f"{'all stages':<44}{seconds:>14}{worked:>14.0f}")
    return [*lines, *table([*files.values()], record)]


def _files(folder: Path) -> dict[Path, dict[str, Any]]:
    return {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def recorded(folder: Path) -> dict[str, Any]:
    """What `make everything` keeps of a whole CI."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ran = stages(folder)
    return {
        "commit": commit.strip(),
        "day": datetime.now(UTC).date().isoformat(),
        "seconds": sum(stage.seconds for stage in ran),
        "processor_seconds": round(sum(stage.processor_seconds for stage in ran)),
        "stages": {stage.name: [stage.seconds, round(stage.processor_seconds)] for stage in ran},
        "folders": {
            name: [[cost.tests, round(cost.processor_seconds, 1)] for cost in costs]
            for name, costs in by_folder(_files(folder).values()).items()
        },
    }


if __name__ == "__main__":
    counted = Path(sys.argv[1])
    print("\n".join(gathered(counted, last_record())))
    if sys.argv[2:] == ["--record"]:
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(recorded(counted), indent=1) + "\n")
