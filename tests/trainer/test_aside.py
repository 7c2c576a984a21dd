"""A thread that hangs holds up neither the end of an event loop nor that of the process."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny_job import copy_job

from rljob_api import RLJob, resolve
from rljob_trainer import aside
from rljob_trainer.driver import run
from rljob_trainer.telemetry.plain import PlainView

HANGING = """
import asyncio, sys, threading
from rljob_trainer import aside
from rljob_trainer.data.ahead import ReadAhead

def never(*place):
    threading.Event().wait()

async def main():
    asyncio.get_running_loop().set_default_executor(aside.Threads())
    rows = ReadAhead(never, 100, 10)
    for reading in (asyncio.to_thread(never), aside.aside(lambda: rows.take(0, 0))):
        try:
            await asyncio.wait_for(reading, 0.1)
        except TimeoutError:
            print("told", flush=True)

aside._LAST_SECONDS = 0.1
asyncio.run(main())
sys.exit(75)
"""


def test_storage_that_does_not_answer_keeps_no_process_from_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (75, "told\ntold\n", "")


BUSY = """
import asyncio, time
from rljob_trainer import aside

def slowly(what):
    time.sleep(0.3)
    print(what, flush=True)

async def main():
    asyncio.get_running_loop().set_default_executor(aside.Threads())
    asyncio.get_running_loop().run_in_executor(None, slowly, "first")

asyncio.run(main())
calls = aside.InOrder("calls")
for what in ("second", "not begun"):
    calls.submit(slowly, what)
time.sleep(0.1)
"""


def test_what_threads_are_at_when_the_process_ends_is_done_and_nothing_more_is_begun() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "first\nsecond\n", "")


def test_a_run_whose_data_do_not_answer_ends_when_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs, longest = threading.Event(), 30.0

    def never(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        hangs.wait(longest)

    monkeypatch.setattr(run, "read_inputs", never)
    monkeypatch.setattr(aside, "_LAST_SECONDS", 0.1)
    job = resolve(RLJob.model_validate(copy_job()))
    began = time.monotonic()
    ending = asyncio.run(run.run_job(job, run.RunOptions(tmp_path / "run", tmp_path), PlainView(io.StringIO())))
    assert (ending.reason, ending.signal) == ("SIGTERM before the first step", signal.SIGTERM)
    assert time.monotonic() - began < longest
    hangs.set()
