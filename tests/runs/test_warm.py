"""A forked run is what one in an interpreter of its own would be."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from real_runs import Runner, wait_for

SHOWN = """
import atexit, os, sys, threading
atexit.register(print, "at the end")
threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread that stays longer"))).start()
print(__name__, sys.modules["__main__"].__dict__ is globals(), sys.argv, sys.path[0], os.getcwd(), sorted(os.environ))
print(os.environ["GIVEN"], os.environ["HOME"], file=sys.stderr)
print(os.read(0, 1))
print(sorted(os.listdir("/proc/self/fd")))
"""


@pytest.mark.parametrize("kind", ["text", "file"])
def test_it_sees_and_leaves_what_an_interpreter_would(runner: Runner, kind: str) -> None:
    file = runner.folder / "program.py"
    file.write_text(SHOWN)
    program = ("-c", SHOWN, "zero") if kind == "text" else (str(file), "zero")
    forked, own = (
        runner.run("one", Path("two"), program=program, environment={"GIVEN": "to it"}, cold=cold, workers=False)
        for cold in (False, True)
    )
    assert forked == own


def test_a_module_sees_what_it_would(runner: Runner) -> None:
    (runner.folder / "shown.py").write_text(SHOWN)
    forked, own = (
        runner.run("one", program=("-m", "shown"), environment={"GIVEN": "to it"}, cold=cold, workers=False)
        for cold in (False, True)
    )
    assert forked == own


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("raise SystemExit(75)", 75),
        ("import sys; sys.exit('a sentence')", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os, signal; signal.signal(15, signal.SIG_DFL); os.kill(os.getpid(), 15)", -15),
    ],
)
def test_its_end_is_known(runner: Runner, text: str, code: int) -> None:
    assert runner.run(program=("-c", text), expect=code) == runner.run(program=("-c", text), expect=code, cold=True)


def test_an_error_is_printed_and_its_code_is_1(runner: Runner) -> None:
    assert runner.run(program=("-c", "1 / 0"), expect=1).endswith("ZeroDivisionError: division by zero\n")


def test_it_is_there_until_it_is_asked_and_others_do_not_wait_for_it(runner: Runner) -> None:
    """A signal to one that has just ended is lost, and hits nobody else."""
    slow = runner.start(program=("-c", "import time; time.sleep(600)"))
    quick = runner.start(program=("-c", "open('done', 'w')"))
    wait_for((runner.folder / "done").exists, slow)
    with pytest.raises(subprocess.TimeoutExpired):
        slow.wait(0.5)
    os.kill(quick.pid, signal.SIGTERM)
    assert quick.wait() in (0, -signal.SIGTERM)
    assert not psutil.pid_exists(quick.pid)
    assert slow.poll() is None
    slow.kill()
    assert slow.wait() == -signal.SIGKILL
