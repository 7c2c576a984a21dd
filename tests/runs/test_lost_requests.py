"""An engine that dies: the ledger says which prompts were asked again, and a successor gets weights at any time."""

from __future__ import annotations

import sqlite3

import psutil
import pytest
from driver_client import Client
from real_runs import Runner, free_port, metrics_of, wait_for
from tiny_job import copy_job

pytestmark = pytest.mark.integrity


def engines_of(driver: int) -> list[psutil.Process]:
    tree = psutil.Process(driver).children(recursive=True)
    return [p for p in tree if any(part.startswith("ray::EngineActor") for part in p.cmdline())]


def test_what_a_dead_engine_had_in_hand_is_on_record(runner: Runner) -> None:
    model = {
        "hiddenSize": 256,
        "layers": 8,
        "heads": 4,
        "contextLength": 64,
        "tokenizer": {"characters": "0123456789="},
    }
    job = runner.write(
        copy_job(
            model={"random": model},
            placement="separate",
            batch={"groups": 32, "samplesPerPrompt": 8},
            rollout={"engine": "torch", "maxResponseTokens": 56, "replicas": 2},
            validation={"atStart": False},
            stop={"steps": 1},
        )
    )
    output, client = runner.folder / "output", Client(free_port())
    process = runner.start("run", job, "--output", output, "--status-port", str(client.port))

    def both_busy() -> bool:
        engines = client.status().pools.rollout.engines
        return len(engines) == 2 and all(engine.running for engine in engines)

    wait_for(both_busy, process)
    engines_of(process.pid)[0].kill()
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    with sqlite3.connect(f"file:{output / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        again = ledger.execute("SELECT DISTINCT attempt, reason, state FROM resampled").fetchall()
        asked = {ordinal for (ordinal,) in ledger.execute("SELECT ordinal FROM resampled")}
        ended = ledger.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall()
    assert again == [(1, "engine lost", "running")]
    assert asked <= set(range(32))
    assert ended == [("trained", 32)]


def test_the_only_engine_may_die_within_a_version_of_many_pulls(runner: Runner) -> None:
    """Seven of eight moments are between two pulls, when the learner has moved on from what was published."""
    job = runner.write(
        copy_job(
            placement="separate",
            batch={"samplesPerPrompt": 4, "miniBatchGroups": 4},
            pipeline={"mode": "fullyAsync", "syncEvery": 8, "staleness": {"maxAge": 1}},
            rollout={"engine": "torch", "maxResponseTokens": 3, "replicas": 1},
            validation={"atStart": False},
            checkpoint={"everySteps": 0},
            deadlines={"progressSeconds": 60},
            stop={"steps": 12},
        )
    )
    output = runner.folder / "output"
    process = runner.start("run", job, "--output", output)
    for killed in range(3):
        wait_for(lambda seen=3 * killed: len(metrics_of(output)) > seen and engines_of(process.pid), process)  # type: ignore[misc]
        engines_of(process.pid)[0].kill()
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert [record["step"] for record in metrics_of(output)] == list(range(1, 13))
    assert max(record["age/max"] for record in metrics_of(output)) <= 1
