"""A driver that was cut off while another took over its run comes back: it changes nothing, and says why it ends."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from real_runs import Process, Runner, metrics_of, wait_for
from tiny_job import copy_job
from warm import Forked

from rljob_trainer.telemetry.summary import Summary

pytestmark = pytest.mark.integrity


@pytest.mark.slow(
    stands_for=["[between checkpoints-while the other trains]", "[within a checkpoint-after the other's end]"]
)
@pytest.mark.parametrize("ended", [False, True], ids=["while the other trains", "after the other's end"])
@pytest.mark.parametrize("within", [False, True], ids=["between checkpoints", "within a checkpoint"])
def test_the_older_of_two_drivers_ends_without_a_trace(runner: Runner, ended: bool, within: bool) -> None:
    job = runner.write(copy_job(checkpoint={"everySteps": 2 if within else 6}, stop={"steps": 400}))
    output = runner.folder / "output"
    old = runner.start("run", job, "--output", output)
    there = [".writing-", "step-"] if within else ["step-"]
    wait_for(lambda: checkpoints(output) == there, old, look_seconds=0.001 if within else 0.02)
    cut_off(old, output)
    # Where storage is shared by nodes, a lock is seen on its own node only.
    (output / ".lock").rename(runner.folder / "lock-of-the-other-node")
    new = runner.start("run", job, "--output", output)
    wait_for(lambda: json.loads((output / "attempt.json").read_text())["attempt"] == 2, new)
    begun = len(metrics_of(output))
    wait_for(lambda: metrics_of(output)[-1]["step"] > begun + 4, new)
    if ended:
        new.send_signal(signal.SIGTERM)
        new.wait(60)
        left = contents(output)
    old.send_signal(signal.SIGCONT)
    printed, _ = old.communicate(timeout=60)
    assert old.returncode == 75, printed
    assert "attempt 2 has taken over; attempt 1 no longer saves or publishes" in printed
    if ended:
        assert contents(output) == left
    else:
        new.send_signal(signal.SIGTERM)
        new.wait(60)
    summary = Summary.read(output)
    assert (summary.outcome, summary.resumed_from_step is not None) == ("interrupted", True)
    steps = [row["step"] for row in metrics_of(output)]
    assert steps == sorted(set(steps))
    trained = [row["trained_step"] for row in ledger_of(output) if row["state"] == "trained"]
    assert Counter(trained) == dict.fromkeys(range(1, summary.steps + 1), 8)


def checkpoints(output: Path) -> list[str]:
    """Beginnings of the folders' names."""
    return sorted({name.partition("-")[0] + "-" for name in os.listdir(output / "checkpoints")})


def cut_off(driver: Process | Forked, output: Path) -> None:
    """Stops a driver where it is, but not within a transaction: the ledger would stay locked, and the other driver's
    is the same file here. On a node of its own it is another one."""
    for _ in range(100):
        driver.send_signal(signal.SIGSTOP)
        wait_for(lambda: is_stopped(driver.pid), driver)
        with closing(sqlite3.connect(output / "ledger.sqlite", timeout=0, isolation_level=None)) as ledger:
            try:
                ledger.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    raise
        driver.send_signal(signal.SIGCONT)
        time.sleep(0.005)
    pytest.fail("the driver is always within a transaction")


def is_stopped(process: int) -> bool:
    """Whether all its threads are."""
    states = [(task / "stat").read_text().rpartition(") ")[2][0] for task in Path(f"/proc/{process}/task").iterdir()]
    return set(states) == {"T"}


def contents(folder: Path) -> dict[str, object]:
    """What a run leaves for others: every byte of its files, and every row of its ledger."""
    names = ("metrics.jsonl", "summary.json", "status.json", "attempt.json", "report.html")
    files = [folder / name for name in names] + [p for p in (folder / "checkpoints").rglob("*") if p.is_file()]
    return {str(path): path.read_bytes() for path in files} | {"ledger": ledger_of(folder)}


def ledger_of(folder: Path) -> list[dict[str, object]]:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        ledger.row_factory = sqlite3.Row
        return [dict(row) for row in ledger.execute("SELECT * FROM groups ORDER BY ordinal")]
