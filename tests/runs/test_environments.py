"""Episodes of several turns in whole runs: a model learns to use a tool, and kills change nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.kills.runs import check, run_to_the_end
from real_runs import Runner, metrics_of
from test_kills import forked
from warm import Warm

from rljob_trainer.cli import main

pytestmark = pytest.mark.usefixtures("two_epochs")

PARITY = Path(__file__).parents[2] / "examples" / "tools" / "parity.yaml"
AGENT = Path(__file__).parents[2] / "examples" / "openai-agent" / "parity.yaml"
SEARCH = Path(__file__).parents[2] / "examples" / "search"
RETOOL = Path(__file__).parents[2] / "examples" / "retool"
SLOW_TOOL = Path(__file__).parents[2] / "benchmarks" / "deadlines" / "job.yaml"


def test_a_model_asks_a_tool_for_what_it_cannot_tell(runner: Runner) -> None:
    """The first steps of the example. That it learns to is shown below."""
    output = runner.folder / "output"
    settings = ["pipeline.mode=fullyAsync", "batch.groups=null", "batch.miniBatchGroups=8", "validation.every=4"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    runner.run("run", PARITY, "--output", output, "--steps", "4", *arguments)
    validated = [step for step in metrics_of(output) if "validation/held-out/mean@1" in step]
    assert [step["step"] for step in validated] == [0, 4]
    steps = [step for step in metrics_of(output) if step["step"] > 0]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        turns = step["response/turns/mean"]  # each says one token; between two of them lie two that it was told
        assert 1 < turns < 2
        assert step["response/trained_ratio"] == pytest.approx(turns / (3 * turns - 2), rel=1e-3)


@pytest.mark.slow(stands_for="test_a_model_asks_a_tool_for_what_it_cannot_tell")
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


@pytest.mark.slow(stands_for="test_a_model_asks_a_tool_for_what_it_cannot_tell")
def test_a_model_that_hardly_calls_the_interpreter_learns_to(runner: Runner) -> None:
    """Calls are programs that the model writes and the sandbox runs."""
    output, model = runner.folder / "output", runner.folder / "model"
    subprocess.run([sys.executable, RETOOL / "cold_start.py", model], check=True, timeout=300)
    runner.run("run", RETOOL / "tiny.yaml", "--output", output, "--set", f"model.source={model}")
    steps = metrics_of(output)
    rewards = [step["validation/held-out/mean@1"] for step in steps if "validation/held-out/mean@1" in step]
    assert rewards[0] < 0.6
    assert rewards[-1] >= 0.95
    first, *_, last = [step for step in steps if step["step"] > 0]
    # The last batch is of weights before those that validation has found to be good.
    assert last["tool_call_counts/mean"] > first["tool_call_counts/mean"] + 0.2
    for step in (first, last):
        # An episode has four answers at most, and two calls; one may be cut before it answers to what it was told.
        assert 2 <= step["num_turns/mean"] <= 8
        assert step["tool_call_counts/max"] <= 2
        assert 0 < step["agent_loop/tool_calls/mean"] <= step["agent_loop/tool_calls/max"] < 30
    assert main(["validate", str(RETOOL / "retool-7b.yaml")]) == 0


def test_a_model_searches_for_what_it_cannot_know(runner: Runner) -> None:
    """The first steps of the example, and that it does not go on with other passages. That it goes on with the same is
    shown below."""
    example, output, arguments = searching(runner)
    assert "corpus: indexed 400 passages in" in runner.run("run", *arguments, "--steps", "2")
    steps = [step for step in metrics_of(output) if step["step"] > 0]
    assert [step["step"] for step in steps] == [1, 2]
    assert sum(step["rollout/tool_calls"] for step in steps) > 0
    facts = example / "data" / "facts.jsonl"
    lines = facts.read_text().splitlines(keepends=True)
    facts.write_text("".join(reversed(lines)))
    printed = runner.run("run", *arguments, "--steps", "4", expect=66)
    assert "the corpus of the tool search has changed since checkpoint" in printed


@pytest.mark.slow(
    stands_for=[
        "test_a_model_searches_for_what_it_cannot_know",
        "tests/trainer/environments/test_search.py::test_an_index_is_made_once",
        "tests/trainer/commands/test_preflight.py::test_passages_of_a_search_are_looked_at",
    ]
)
def test_a_search_goes_on_with_the_index_that_is_kept(runner: Runner) -> None:
    example, output, arguments = searching(runner)
    assert "corpus: indexed 400 passages in" in runner.run("run", *arguments, "--steps", "2")
    printed = runner.run("run", *arguments, "--steps", "4")
    assert "resuming from the checkpoint of step 2" in printed
    assert "indexed" not in printed
    assert [step["step"] for step in metrics_of(output) if step["step"] > 0] == [1, 2, 3, 4]
    facts = example / "data" / "facts.jsonl"
    facts.write_text("".join(facts.read_text().splitlines(keepends=True)[:7]) + '{"title": "x"}\n')
    printed = runner.run("run", *arguments, "--steps", "6", expect=64)
    assert "facts.jsonl, line 8: the row has no column" in printed
    assert main(["validate", str(SEARCH / "search-r1-3b.yaml")]) == 0


def searching(runner: Runner) -> tuple[Path, Path, list[str | Path]]:
    """A copy of the example, the output of its runs, and their arguments."""
    model, example, output = (runner.folder / name for name in ("model", "search", "output"))
    shutil.copytree(SEARCH, example)
    # It writes calls by then, one in ten times, and not yet the name that it is asked for.
    started = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    runner.run(SEARCH / "cold_start.py", model, "100", program=("-c", started), workers=False)
    settings = [f"model.source={model}", "pipeline.mode=sync", "batch.groups=16", "checkpoint.everySteps=2"]
    return example, output, [example / "tiny.yaml", "--output", output, *(p for s in settings for p in ("--set", s))]


@pytest.mark.integrity
def test_every_prompt_of_two_turns_ends_once_whoever_is_killed(tmp_path: Path, warm: Warm) -> None:
    with forked(tmp_path, warm):
        story = run_to_the_end("fullyAsync", tmp_path, ["engine", "driver", "all"], seed=18, turns=2)
    assert len(story.kills) == 3
    check(tmp_path / "output", "fullyAsync", story.undone)


@pytest.mark.integrity
@pytest.mark.slow(
    stands_for=[
        "test_every_prompt_of_two_turns_ends_once_whoever_is_killed",
        "tests/runs/test_kills.py::test_sync_ends_as_if_nothing_had_happened",
    ]
)
def test_sync_episodes_of_two_turns_end_as_if_nothing_had_happened(tmp_path: Path, warm: Warm) -> None:
    with forked(tmp_path / "whole", warm):
        run_to_the_end("sync", tmp_path / "whole", [], seed=0, turns=2)
    with forked(tmp_path / "killed", warm):
        story = run_to_the_end("sync", tmp_path / "killed", ["driver", "engine", "all"], seed=13, turns=2)
    assert len(story.kills) == 3
    assert check(tmp_path / "killed" / "output", "sync", story.undone) == check(tmp_path / "whole" / "output", "sync")


@pytest.mark.slow(
    stands_for=[
        "test_every_episode_of_agents_ends_once_whoever_is_killed[oneStepOff]",
        "tests/trainer/environments/test_agents.py::test_a_command_plays_an_episode_with_openais_client",
    ]
)
def test_an_agent_is_trained_through_openais_client(runner: Runner) -> None:
    """The example, whose minutes until it has learned are not for every run of the tests; in all pipelines agents are
    killed below."""
    output = runner.folder / "output"
    settings = ["pipeline.mode=fullyAsync", "data.validation[0].limit=8"]
    settings += ["batch.miniBatchGroups=4", "batch.groups=null"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    runner.run("run", AGENT, "--output", output, "--steps", "3", *arguments)
    steps = metrics_of(output)
    assert "validation/held-out/mean@1" in steps[0]
    steps = [step for step in steps if step["step"] > 0]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert sum(step["rollout/branched_turns"] for step in steps) == 0
    # It tries the tool from the first step on, now and then.
    assert any(step["response/turns/mean"] > 1 for step in steps)
    for step in steps:
        turns = step["response/turns/mean"]  # each says one token; between two of them lie two that it was told
        assert step["response/trained_ratio"] == pytest.approx(turns / (3 * turns - 2), rel=1e-3)


@pytest.mark.integrity
@pytest.mark.slow(stands_for="[oneStepOff]")
@pytest.mark.parametrize("mode", ["oneStepOff", "fullyAsync"])
def test_every_episode_of_agents_ends_once_whoever_is_killed(tmp_path: Path, warm: Warm, mode: str) -> None:
    with forked(tmp_path, warm):
        story = run_to_the_end(mode, tmp_path, ["engine", "driver", "all"], seed=23, turns=2, agent=True)
    assert len(story.kills) == 3
    check(tmp_path / "output", mode, story.undone)
    assert sum(step["rollout/diverged_episodes"] for step in metrics_of(tmp_path / "output") if step["step"]) > 0


@pytest.mark.integrity
@pytest.mark.slow(
    stands_for=[
        "test_every_episode_of_agents_ends_once_whoever_is_killed[oneStepOff]",
        "tests/runs/test_kills.py::test_sync_ends_as_if_nothing_had_happened",
    ]
)
def test_sync_episodes_of_agents_end_as_if_nothing_had_happened(tmp_path: Path, warm: Warm) -> None:
    """An agent begins anew; this one does the same again, and the model's random numbers are those of the place."""
    with forked(tmp_path / "whole", warm):
        run_to_the_end("sync", tmp_path / "whole", [], seed=0, turns=2, agent=True)
    with forked(tmp_path / "killed", warm):
        story = run_to_the_end("sync", tmp_path / "killed", ["driver", "engine", "all"], seed=24, turns=2, agent=True)
    assert len(story.kills) == 3
    assert check(tmp_path / "killed" / "output", "sync", story.undone) == check(tmp_path / "whole" / "output", "sync")


def test_late_groups_are_ended_and_trained_within_the_bound(runner: Runner) -> None:
    """A tool with a long tail before a trainer that does not wait for it."""
    output = runner.folder / "output"
    settings = ["rollout.environment.params.mean=5", "rollout.environment.params.sigma=2", "stop.steps=8"]
    settings += ["model.random.hiddenSize=64", "model.random.intermediateSize=128", "model.random.layers=2"]
    settings += ["pipeline.staleness.onDeadline=end", "logging.samplesEvery=1", "logging.samplesPerWrite=10000"]
    runner.run("run", SLOW_TOOL, "--output", output, *(part for value in settings for part in ("--set", value)))
    steps = [step for step in metrics_of(output) if step["step"] > 0]
    assert max(step["age/max"] for step in steps) == 4
    late = sum(step["pipeline/late_groups"] for step in steps)
    assert late > 0
    assert sum(step["pipeline/dropped_groups"] for step in steps) == 0
    written = [line for path in (output / "samples").glob("step-*.jsonl") for line in path.read_text().splitlines()]
    samples = [row for row in map(json.loads, written) if row["finish"] == "deadline"]
    assert samples
    # Most have said their first answer alone, since the tool had not told them anything; who was about to say the
    # second may have said enough of it to be right.
    untold = [row for row in samples if "turns" not in row]
    assert len(untold) > len(samples) / 2
    assert all(row["score"] == 0 and 1 <= row["tokens"] <= 8 for row in untold)
    assert all(1 <= row["tokens"] <= 8 + 1 + 8 for row in samples)
