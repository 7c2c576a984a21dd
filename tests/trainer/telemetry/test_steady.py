"""A view whose stream fails stops nobody, and Python does not complain at exit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from rljob_trainer.telemetry.open_view import open_view
from rljob_trainer.telemetry.view import JobSummary, ShownStep

with open_view(plain=sys.argv[1] == "plain") as view:
    view.start(JobSummary(name="quickstart", algorithm="grpo", model="llama", total_steps=2))
    for step in range(2000):  # more than any buffer takes
        view.step(ShownStep(step, {"reward/mean": 0.5}))
        view.message("a line of log")
print("the run is over", file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["plain", "live"])
def test_a_reader_that_goes_away_stops_nobody(kind: str) -> None:
    command = [sys.executable, "-c", PROGRAM, kind]
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (process.returncode, process.stderr) == (0, "the run is over\n")


def test_a_full_disk_stops_nobody() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", PROGRAM, "plain"]
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert "the run is over\n" in process.stderr
