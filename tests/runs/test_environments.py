"""Episodes of several turns in whole runs: a model learns to use a tool, and kills change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.kills.runs import check, run_to_the_end
from real_runs import Runner, metrics_of
from test_kills import forked
from warm import Warm

PARITY = Path(__file__).parents[2] / "examples" / "tools" / "parity.yaml"


def test_a_model_learns_to_ask_a_tool_for_what_it_cannot_tell(runner: Runner) -> None:
    output = runner.folder / "output"
    runner.run("run", PARITY, "--output", output, "--set", "pipeline.mode=fullyAsync", "--set", "batch.groups=null")
    steps = metrics_of(output)
    rewards = [step["validation/held-out/mean@1"] for step in steps if "validation/held-out/mean@1" in step]
    assert rewards[0] < 0.6
    assert rewards[-1] >= 0.95
    steps = [step for step in steps if step["step"] > 0]
    # The last batch is of weights before those that validation has found to be good.
    assert steps[-1]["response/turns/mean"] > steps[0]["response/turns/mean"] + 0.2
    for step in steps:
        turns = step["response/turns/mean"]  # each says one token; between two of them lie two that it was told
        assert step["response/trained_ratio"] == pytest.approx(turns / (3 * turns - 2), rel=1e-3)


def test_every_prompt_of_two_turns_ends_once_whoever_is_killed(tmp_path: Path, warm: Warm) -> None:
    with forked(tmp_path, warm):
        story = run_to_the_end("fullyAsync", tmp_path, ["engine", "driver", "all"], seed=21, turns=2)
    assert len(story.kills) == 3
    check(tmp_path / "output", "fullyAsync", story.undone)


def test_sync_episodes_of_two_turns_end_as_if_nothing_had_happened(tmp_path: Path, warm: Warm) -> None:
    run_to_the_end("sync", tmp_path / "whole", [], seed=0, turns=2)
    with forked(tmp_path / "killed", warm):
        story = run_to_the_end("sync", tmp_path / "killed", ["driver", "engine", "all"], seed=22, turns=2)
    assert len(story.kills) == 3
    assert check(tmp_path / "killed" / "output", "sync", story.undone) == check(tmp_path / "whole" / "output", "sync")
