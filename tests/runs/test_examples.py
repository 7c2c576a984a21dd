"""GSM8K's example, the one to start from, and the pipelines' run from end to end with tiny models."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path

import pytest
from real_runs import Runner, metrics_of

from rljob_api.spec.model import Model
from rljob_trainer.cli import main
from rljob_trainer.models import materialise

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TWINS = EXAMPLES / "pipelines"
MISMATCH = "fully-async-dapo-7b/mismatch-correction"


@pytest.mark.slow(stands_for="[torch]")
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"rollout.engine": "torch", "rollout.engineArgs": "{}"}, id="torch"),
        # The example's own engine, with its arguments.
        pytest.param({}, id="vllm", marks=pytest.mark.vllm),
    ],
)
def test_gsm8k_runs_from_end_to_end_with_a_tiny_model(runner: Runner, engine: dict[str, str]) -> None:
    lines = [line for path in (EXAMPLES / "data" / "gsm8k").glob("*.jsonl") for line in path.read_text().splitlines()]
    characters = set("\n").union(*(json.loads(line)["question"] for line in lines), string.printable)
    model = {
        "hiddenSize": 32,
        "layers": 1,
        "heads": 1,
        "contextLength": 1600,
        "tokenizer": {"characters": "".join(sorted(characters))},
    }
    output = runner.folder / "output"
    changes = {
        "model.source": "null",
        "model.random": json.dumps(model),
        "rollout.gpusPerReplica": "0",
        "rollout.maxResponseTokens": "8",
        "trainer.gpusPerReplica": "0",
        "batch.groups": "8",
        "batch.miniBatchGroups": "4",
        "data.validation[0].limit": "4",
        "stop.epochs": "null",
        **engine,
    }
    arguments = [part for path, value in changes.items() for part in ("--set", f"{path}={value}")]
    runner.run("run", EXAMPLES / "gsm8k.yaml", "--output", output, "--steps", "2", *arguments)
    records = metrics_of(output)
    assert [r["step"] for r in records] == [0, 1, 2]
    assert "critic/loss" in records[1]
    assert "kl/in_reward" in records[1]
    assert "validation/gsm8k-test/mean@1" in records[2]
    # Trainer and engine are one model before the first step and after the publications of two.
    assert all(r["mismatch/canary/max"] < 1e-3 for r in records if "mismatch/canary/max" in r)
    written = (output / "job.yaml").read_text()
    assert f"engine: {engine.get('rollout.engine', 'vllm')}" in written


def test_three_lines_make_a_job_of_ones_own_model_data_and_reward(runner: Runner) -> None:
    """What the README promises, with the README's reward."""
    random = {
        "hiddenSize": 32,
        "layers": 1,
        "heads": 1,
        "contextLength": 1200,
        "tokenizer": {"characters": "".join(sorted(string.printable))},
    }
    materialise(Model.model_validate({"random": random}), runner.folder / "my-model")
    rows = [{"question": f"{n} and {n}?", "answer": str(2 * n)} for n in range(1000, 1020)]
    (runner.folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (reward,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (runner.folder / "my_rewards.py").write_text(reward)
    own = {
        "1": "  model: {source: my-model}",
        "2": "    train: {source: mine.jsonl}",
        "3": '  reward: {functions: [{type: custom, function: "my_rewards:brevity"}]}',
    }
    lines = (EXAMPLES / "own-data.yaml").read_text().splitlines()
    marks = [re.search(r"# (\d): ", line) for line in lines]
    assert [mark[1] for mark in marks if mark] == list(own)
    changed = [own[mark[1]] if mark else line for line, mark in zip(lines, marks, strict=True)]
    job, output = runner.folder / "job.yaml", runner.folder / "output"
    job.write_text("\n".join(changed))
    assert main(["validate", str(job)]) == 0
    runner.run("run", job, "--output", output, "--steps", "2")
    records = metrics_of(output)
    assert [r["step"] for r in records] == [1, 2]
    # Random text has several words, each of which takes something, and hardly ever the answer.
    assert all(-1 < r["reward/mean"] < 0 for r in records)


@pytest.mark.slow(stands_for="[fully asynchronous, corrected]")
@pytest.mark.parametrize(
    ("files", "age"),
    [(["one-step-off"], 1), (["fully-async-dapo-7b/base", "fully-async-dapo-7b/8-8", MISMATCH], 4)],
    ids=["one step off", "fully asynchronous, corrected"],
)
def test_a_large_example_runs_on_two_cores(runner: Runner, files: list[str], age: int) -> None:
    output = runner.folder / "output"
    paths = [EXAMPLES / f"{name}.yaml" for name in (*files, "overlays/two-cores")]
    runner.run("run", *paths, "--output", output, "--steps", "2")
    records = metrics_of(output)
    assert [(record["step"], record.get("progress/samples", 0)) for record in records] == [(0, 0), (1, 2048), (2, 4096)]
    assert 0 < records[2]["age/max"] <= age


@pytest.mark.slow(
    stands_for="tests/trainer/rollout/test_vllm_routing.py::test_a_token_keeps_the_experts_of_the_pass_that_it_was_sampled_in"
)
@pytest.mark.vllm
def test_a_mixture_of_experts_learns_in_rows_of_two_ranks(runner: Runner) -> None:
    """The twin of the recipe for 30 thousand million parameters: its experts reach the engine with every version."""
    output, folder = runner.folder / "output", EXAMPLES / "dapo-30b-a3b-fsdp"
    runner.run("run", folder / "dapo-30b-a3b.yaml", folder / "tiny.yaml", "--output", output, "--steps", "12")
    records = metrics_of(output)
    score = "validation/held-out/score/mean@1"
    held = [record[score] for record in records if score in record]
    assert held[0] == pytest.approx(-0.1, abs=0.05), "no sum right, and all too long"
    assert held[-1] > 0.03
    assert all(record["mismatch/canary/max"] < 1e-4 for record in records if "mismatch/canary/max" in record)
    trained = [record for record in records if record["step"]]
    assert all(1 < record["moe/fullest_expert/mean"] <= record["moe/fullest_expert/max"] <= 4 for record in trained)
    assert all(0 < record["age/max"] <= 4 for record in trained[1:])
    # Prompts and responses, all of them; and with no older weights than these the routers have learnt something else.
    assert all(record["moe/replayed"] == 1 for record in trained)
    assert all(record["moe/rerouted"] < 0.5 for record in trained)
    assert any(record["moe/rerouted"] > 0 for record in trained)


@pytest.mark.slow(stands_for="tests/runs/test_learning.py::test_a_run_learns_to_repeat_two_digits")
def test_a_model_learns_to_finish_programs_from_their_tests_alone(runner: Runner) -> None:
    output = runner.folder / "output"
    runner.run("run", EXAMPLES / "code" / "operators.yaml", "--output", output)
    records = metrics_of(output)
    held = [record["validation/same/mean@1"] for record in records if "validation/same/mean@1" in record]
    # Of 18 characters two are right, in this order: one try in 300.
    assert held[0] < 0.4
    assert held[-1] == 1.0
    last = records[-1]
    assert last["reward/error_ratio"] == 0.0
    assert last["reward/part/codeTests.passed/mean"] >= last["reward/part/codeTests/mean"] > 0.1
    assert main(["validate", str(EXAMPLES / "code" / "deepcoder-7b.yaml")]) == 0


@pytest.mark.slow(stands_for="[partial-rollout-decoupled-2]")
@pytest.mark.parametrize(("mode", "correction", "age"), [("stream", "bypass", 0), ("partial-rollout", "decoupled", 2)])
def test_a_twin_runs_within_its_bound(runner: Runner, mode: str, correction: str, age: int) -> None:
    """The modes differ in nothing but these settings, so two of them stand for all."""
    output = runner.folder / mode
    runner.run(
        "run", EXAMPLES / "quickstart.yaml", TWINS / f"{mode}.yaml", "--output", output, "--steps", "4",
        "--set", "data.validation[0].limit=8", "--set", f"algorithm.rolloutCorrection.mode={correction}",
    )  # fmt: skip
    records = metrics_of(output)
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    ages = [record["age/max"] for record in records[1:]]
    assert max(ages) <= age
    # Four pulls make a version, and the learning rate falls with versions.
    rates = [record["actor/learning_rate"] for record in records[1:]]
    assert rates == pytest.approx([5e-3 * (1 - 0.95 * step / 449) for step in range(4)])
