"""An engine and a rank that take turns on one device compute what they compute side by side."""

from __future__ import annotations

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
        ("plain", True, {"cold": True}, "4"),
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
