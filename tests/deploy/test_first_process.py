"""The first process of a namespace: programs that end are started again, stopped ones are not, orphans are reaped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testcluster import control

SCRIPT = """
import sys
from pathlib import Path
from testcluster import control
from testcluster.first_process import Processes, serve

folder = Path(sys.argv[1])
programs = Processes(folder / "log", {"PATH": "/usr/bin:/bin"})
listening = control.listen(folder / "control.sock")
programs.start("short", ["sh", "-c", "echo again; sleep 0.1"])
programs.start("long", ["sleep", "1000"])

def answer(words):
    match words:
        case ["start", name]: programs.start(name)
        case ["stop", name]: programs.stop(name)
    return " ".join(programs.names())

serve(programs, listening, answer)
"""


@pytest.fixture
def first_process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], env=os.environ | {"PYTHONPATH": "deploy"})
    deadline = time.monotonic() + 30
    while control.listener_of(tmp_path / "control.sock") is None:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield process
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), 9)
    process.kill()
    process.wait()


def test_a_program_that_ends_is_started_again(first_process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    log = tmp_path / "log" / "short.log"
    deadline = time.monotonic() + 30
    while not log.exists() or log.read_text().count("again\n-- ended with 0; started again\n") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_stopped_program_stays_stopped_until_it_is_started(
    first_process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    socket = tmp_path / "control.sock"
    assert "long" not in control.ask(socket, "stop long").split()
    with pytest.raises(control.RefusedError, match="long doesn't run"):
        control.ask(socket, "stop long")
    assert "long" in control.ask(socket, "start long").split()
    with pytest.raises(control.RefusedError, match="long runs already"):
        control.ask(socket, "start long")
    with pytest.raises(control.RefusedError, match="there is no program other"):
        control.ask(socket, "start other")
