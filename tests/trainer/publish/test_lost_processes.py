"""When a lost engine's memory is free: its processes are waited for by the ranks that are where it was."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest

from rljob_trainer.publish.lost_processes import wait_until_gone
from rljob_trainer.rollout.actor import EnginePlace, own_pod

RANK: Any = None  # whose models do not matter here


def sleeping(seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", str(seconds)])


def test_the_core_of_an_engine_is_waited_for_after_the_engine_itself() -> None:
    engine, core = sleeping(0), sleeping(1)
    wait_until_gone(RANK, EnginePlace(own_pod(), engine.pid, (core.pid,)))
    assert core.poll() == 0  # it has ended; nobody had waited for it
    engine.wait()


def test_one_that_stays_is_told_of_and_one_elsewhere_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    process = sleeping(60)
    try:
        started = time.monotonic()
        wait_until_gone(RANK, EnginePlace("another pod", process.pid), seconds=600)
        assert time.monotonic() < started + 600
        wait_until_gone(RANK, EnginePlace(own_pod(), process.pid), seconds=0.2)
        assert f"processes [{process.pid}] of a lost engine are still running" in caplog.text
    finally:
        process.kill()
        process.wait()
