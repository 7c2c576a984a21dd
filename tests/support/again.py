"""What failed among ten thousand tests runs again, alone: CI is not lost to one unlucky test, and does not forget it.

A plugin that `.ci/run` switches on (``RLJOB_AGAIN`` names a folder that all stages of a CI share). When the workers of
a stage have ended, and what they left behind is ended, each test that failed runs in a fresh pytest without workers,
three times in a row. One that passes all three is *unsteady*: the stage passes, and CI's last lines name it, with its
first error, the seed and how loaded the machine was. Its output stays in the folder, and `make land` enters it into
`tests/unsteady.yaml`.

No more than two tests of a CI are forgiven so, in 900 seconds in all, and none is begun after 4,000 seconds of it. None
is where collection failed or somebody interrupted, where two workers have died (a dead worker is the failure of the
test that it ran; the second ends the stage), no test that the list does not allow (``unsteady``), and none with the
mark ``integrity``: kills, bits, ledger, receipts, versions, manifests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import processor_time
import pytest
import timings
import unsteady

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
    output: str
    """The file with its first traceback, and what the others printed."""


@dataclass(frozen=True)
class Failure:
    """The first failed report of a test."""

    text: str
    load: float
    integrity: bool

    @property
    def error(self) -> str:
        return first_line(self.text)


def configure(config: pytest.Config) -> None:
    """In the process that others report to, where CI asks for it."""
    folder = os.environ.get(FOLDER)
    if folder and not hasattr(config, "workerinput"):
        config.option.maxworkerrestart = "1"
        config.pluginmanager.register(Again(Path(folder), float(os.environ[BEGAN])))


class Again:
    """Collects failures while tests run, and judges them when all have ended."""

    def __init__(self, folder: Path, began: float) -> None:
        """``began``: when this CI did, by the clock of ``time.time``."""
        self._folder, self._began = folder, began
        self._failed: dict[str, Failure] = {}
        self._collection_failed = False
        self._processes = set[int]()
        """Those that have run tests."""
        self._dead_workers = 0

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._collection_failed |= report.failed

    def pytest_runtest_logreport(self, report: Any) -> None:
        if process := getattr(report, "process", None):  # as ``timings`` has noted it
            self._processes.add(process)
        if report.failed and report.nodeid not in self._failed:
            text = "\n".join([report.longreprtext, *(f"--- {name}\n{printed}" for name, printed in report.sections)])
            self._dead_workers += CRASHED in text
            self._failed[report.nodeid] = Failure(text, os.getloadavg()[0], "integrity" in report.keywords)

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
        if left := processor_time.end_what_is_left(self._processes):
            reporter.write_line(f"ended what tests had left running: {', '.join(sorted(left))}")
        if all(self._passes(test, failure, reporter) for test, failure in self._failed.items()):
            session.exitstatus = pytest.ExitCode.OK

    def _refused(self) -> str:
        """Why nothing is run again; empty where it is."""
        for test, failure in self._failed.items():
            if failure.integrity:
                return f"{test} is of integrity, which has to hold each time"
            if listed := unsteady.refused(unsteady.read(), test, date.today()):
                return f"{test}: {listed}"
        failed = len(read(self._folder)) + len(self._failed)
        if failed > MOST_TESTS:
            return f"{failed} tests of this CI have failed, and {MOST_TESTS} may"
        if time.time() - self._began > LATEST_SECONDS:
            return f"this CI has run for {LATEST_SECONDS:.0f} s"
        return ""

    def _passes(self, test: str, failure: Failure, reporter: Any) -> bool:
        began, before = time.monotonic(), read(self._folder)
        left = MOST_SECONDS - sum(each.seconds for each in before)
        output = self._folder / f"{len(before)}.log"
        output.write_text(f"{test}\n{failure.text}\n")
        for number in range(1, TIMES + 1):
            code = alone(test, output, left - (time.monotonic() - began))
            reporter.write_line(f"again, alone, {number} of {TIMES}: {test}: {'FAILED' if code else 'passed'}")
            if code:
                reporter.write_line(output.read_text())
                return False
        seconds, seed = round(time.monotonic() - began, 1), os.environ.get("RLJOB_SEED", "")
        kept = Unsteady(test, failure.error, failure.load, seed, seconds, str(output))
        with (self._folder / "unsteady.jsonl").open("a") as file:
            file.write(json.dumps(asdict(kept)) + "\n")
        return True


def alone(test: str, output: Path, seconds: float) -> int:
    """Runs a test in a pytest of its own; its exit code, or that of `timeout`. A test of integrity, which the report
    of a dead worker does not tell, is none that could pass."""
    # It counts what it costs, so that what it leaves is known, too, but not for the stage.
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    environment[timings.FOLDER] = str(output.with_suffix(""))
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", "not integrity", test]
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
        finally:
            processor_time.end_what_is_left([process.pid])


def first_line(text: str) -> str:
    """Of what a test has raised, as pytest prints it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line[1:].strip() for line in lines if line.startswith("E ")]
    return next(iter([*raised, *lines]), "")


def read(folder: Path) -> list[Unsteady]:
    """What a CI has forgiven so far."""
    file = folder / "unsteady.jsonl"
    return [Unsteady(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
