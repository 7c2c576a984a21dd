"""What failed among ten thousand tests runs again, alone: CI is not lost to one unlucky test, and does not forget it.

A plugin that `.ci/run` switches on (``RLJOB_AGAIN`` names a folder that all stages of a CI share). When the workers of
a stage have ended, each test that failed runs in a fresh pytest without workers, three times in a row. One that passes
all three is *unsteady*: the stage passes, and CI's last lines name it, with its first error, the seed and how loaded
the machine was; its output stays in the folder.

No more than two tests of a CI are forgiven so, in 900 seconds in all, and none is begun after 4,000 seconds of it. None
is where collection failed or somebody interrupted, where two workers have died (a dead worker is the failure of the
test that it ran), and no test with the mark ``integrity``: kills, bits, ledger, receipts, versions, manifests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

FOLDER, BEGAN = "RLJOB_AGAIN", "RLJOB_CI_BEGAN"
TIMES, MOST_TESTS, MOST_SECONDS, LATEST_SECONDS = 3, 2, 900.0, 4000.0
CRASHED = "crashed while running"
"""What xdist says of a test whose worker has died."""


@dataclass(frozen=True)
class Unsteady:
    """A test that failed among others and passed alone."""

    test: str
    error: str
    """The first line of what it raised."""
    load: float
    """Processes that ran or waited for a processor, as a mean of a minute, when it failed."""
    seed: str
    """``RLJOB_SEED``; empty where all numbers are the same each time."""
    seconds: float
    """What running it again took."""


@dataclass(frozen=True)
class Failure:
    """The first failed report of a test."""

    error: str
    text: str
    load: float
    integrity: bool


def configure(config: pytest.Config) -> None:
    """In the process that others report to, where CI asks for it."""
    folder = os.environ.get(FOLDER)
    if folder and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Again(Path(folder), float(os.environ[BEGAN])))


class Again:
    """Collects failures while tests run, and judges them when all have ended."""

    def __init__(self, folder: Path, began: float) -> None:
        """``began``: when this CI did, by the clock of ``time.time``."""
        self._folder, self._began = folder, began
        self._failed: dict[str, Failure] = {}
        self._collection_failed = False
        self._dead_workers = 0

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._collection_failed |= report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self._failed:
            text = report.longreprtext
            self._dead_workers += CRASHED in text
            integrity = "integrity" in report.keywords
            self._failed[report.nodeid] = Failure(first_line(text), text, os.getloadavg()[0], integrity)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """After xdist's own, which ends the workers."""
        if exitstatus != pytest.ExitCode.TESTS_FAILED or self._collection_failed or self._dead_workers > 1:
            return
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line("")
        if refused := self._refused():
            reporter.write_line(f"not run again: {refused}")
            return
        if all(self._passes(test, failure, reporter) for test, failure in self._failed.items()):
            session.exitstatus = pytest.ExitCode.OK

    def _refused(self) -> str:
        """Why nothing is run again; empty where it is."""
        forgiven = read(self._folder)
        integrity = [test for test, failure in self._failed.items() if failure.integrity]
        if integrity:
            return f"{integrity[0]} is of integrity, which has to hold each time"
        if len(forgiven) + len(self._failed) > MOST_TESTS:
            return f"{len(forgiven) + len(self._failed)} tests of this CI have failed, and {MOST_TESTS} may"
        if time.time() - self._began > LATEST_SECONDS:
            return f"this CI has run for {LATEST_SECONDS:.0f} s"
        return ""

    def _passes(self, test: str, failure: Failure, reporter: Any) -> bool:
        began = time.monotonic()
        left = MOST_SECONDS - sum(each.seconds for each in read(self._folder))
        output = self._folder / f"unsteady-{len(read(self._folder))}.log"
        output.write_text(f"{test}\n{failure.text}\n")
        for time_number in range(1, TIMES + 1):
            code = alone(test, output, left - (time.monotonic() - began))
            became = "FAILED" if code else "passed"
            reporter.write_line(f"again, alone, {time_number} of {TIMES}: {test}: {became}")
            if code:
                return False
        taken = Unsteady(test, failure.error, failure.load, os.environ.get("RLJOB_SEED", ""), time.monotonic() - began)
        with (self._folder / "unsteady.jsonl").open("a") as file:
            file.write(json.dumps(asdict(taken)) + "\n")
        return True


def alone(test: str, output: Path, seconds: float) -> int:
    """Runs a test in a pytest of its own; its exit code, or that of `timeout`."""
    environment: Mapping[str, str] = {name: value for name, value in os.environ.items() if name != FOLDER}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", test]
    with output.open("a") as printed:
        process = subprocess.Popen(
            command, stdout=printed, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            return process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return 124


def first_line(text: str) -> str:
    """Of what a test has raised, as pytest prints it."""
    raised = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return raised[0] if raised else next((line.strip() for line in text.splitlines() if line.strip()), "")


def read(folder: Path) -> list[Unsteady]:
    """What a CI has forgiven so far."""
    file = folder / "unsteady.jsonl"
    return [Unsteady(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
