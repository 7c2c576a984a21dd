"""An engine and a rank that take turns on one device compute what they compute side by side."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from real_runs import Runner, metrics_of
from tiny_job import copy_job


@pytest.mark.integrity
def test_a_run_in_turns_computes_the_same(runner: Runner) -> None:
    """Real parts: a run without turns, one whose engine keeps its cache, and one whose engine frees it at the learner's
    turn. That one is stopped half-way and resumed, so that a checkpoint is written and read between turns."""
    ours = {"program": (str(Path(__file__).with_name("in_turns.py")),)}
    metrics, told = {}, {}
    for name, frees, options, ends in (
        ("plain", True, {}, "4"),
        ("keeps", False, ours, "4"),
        ("frees", True, ours, "24"),
    ):
        rollout = {"engine": "torch", "maxResponseTokens": 3, "freeCacheEngine": frees}
        path = runner.write(copy_job(placement="colocated", rollout=rollout), f"{name}.yaml")
        output, log = runner.folder / name, runner.folder / f"{name}.log"
        for steps in ends:
            arguments = ("run", path, "--output", output, "--steps", steps)
            runner.run(*arguments, environment={"IN_TURNS": str(log)}, **options)
        metrics[name] = [without_times(record) for record in metrics_of(output)]
        told[name] = log.read_text().splitlines() if log.exists() else []
    assert metrics["frees"] == metrics["keeps"] == metrics["plain"]
    assert metrics["plain"][-1]["progress/step"] == 4
    # Something was trained, and it was compared.
    assert {"reward/mean", "actor/grad_norm"} <= set(metrics["plain"][-1])
    assert told["plain"] == told["keeps"] == []
    moves = [line.split() for line in told["frees"]]
    assert [method for method, *_ in moves] == ["sleep", "wake_weights", "wake"] * 6
    sleeps = [(int(before) > 0, int(after)) for method, before, after in moves if method == "sleep"]
    # Either process begins with the learner's turn, before a cache was ever made, and publishes what it begins with.
    assert sleeps == [(False, 0), (True, 0), (True, 0)] * 2


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """What a step computed: not when and how fast, nor what is there because a run ends with the step (it validates,
    and has read no prompts ahead)."""
    taken = ("time", "timing/", "throughput/", "memory/", "rollout/seconds/", "validation/", "progress/epoch")
    ends = ("seconds", "_idle_ratio")
    return {name: value for name, value in record.items() if not name.startswith(taken) and not name.endswith(ends)}


@pytest.mark.slow(stands_for="[torch-1-submit,update,sleep,wake_weights,receive_weights,wake,score]")
@pytest.mark.parametrize(
    ("engine", "ranks", "kills"),
    [
        ("torch", 1, "submit,update,sleep,wake_weights,receive_weights,wake,score"),
        ("torch", 2, "update,submit,wake_weights,receive_weights"),
        pytest.param("vllm", 1, "submit,wake_weights", marks=pytest.mark.vllm),
    ],
)
def test_engines_that_are_killed_whoever_s_turn_it_is_are_replaced(
    runner: Runner, engine: str, ranks: int, kills: str
) -> None:
    """Of real processes, of which those that share a device keep to their turns: every prompt is trained, by one
    process that never starts again."""
    job = copy_job(
        placement="colocated",
        rollout={"engine": engine, "maxResponseTokens": 3},
        trainer={"optimizer": {"learningRate": 1e-3}, "replicas": ranks},
        validation={"atStart": False},
        checkpoint={"everySteps": 100},
        stop={"epochs": 1},
    )
    output, log = runner.folder / "output", runner.folder / "killed.log"
    environment = {"KILLS": kills, "KILLED_LOG": str(log)}
    program = (str(Path(__file__).with_name("killed_in_turns.py")),)
    runner.run("run", runner.write(job), "--output", output, program=program, environment=environment)
    told = log.read_text().splitlines()
    killed = [line.split()[1:] for line in told if line.startswith("killed")]
    assert [moment for moment, _ in killed] == kills.split(",")
    # The last one may still be on its way when the run ends.
    starts = [line for line in told if line.startswith("start ")]
    assert ranks + len(killed) - 1 <= len(starts) <= ranks + len(killed)
    check_starts(told)
    with sqlite3.connect(f"file:{output / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        ends = ledger.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall()
    assert ends == [("trained", 80)]
    assert [record["step"] for record in metrics_of(output) if record["step"] > 0] == list(range(1, 11))


def check_starts(told: list[str]) -> None:
    """No engine starts before the learner has left, and the learner does not come before it has."""
    starting: set[str] = set()
    learner = "the learner wakes"
    for line in told:
        what, _, name = line.partition(" ")
        if what == "start":
            assert learner == "the learner rests", told
            starting.add(name)
        elif what == "started":
            starting.remove(name)
        elif not line.startswith("killed"):
            learner = line
            assert not starting, told
