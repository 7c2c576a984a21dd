"""The example files are valid; GSM8K's, and the one to start from, run from end to end with a tiny model."""

from __future__ import annotations

import json
import re
import string
from pathlib import Path

import pytest
from real_runs import Runner, metrics_of

from rljob_api import load_jobs, resolve
from rljob_api.spec.model import Model
from rljob_trainer.cli import main
from rljob_trainer.models import materialise

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_is_valid(file: Path) -> None:
    assert main(["validate", "--schema-only", str(file)]) == 0


def test_gsm8k_has_the_published_setting() -> None:
    (job,) = load_jobs(EXAMPLES / "gsm8k.yaml")
    spec = resolve(job).spec
    assert (spec.batch.groups, spec.batch.mini_batch_groups, spec.batch.samples_per_prompt) == (256, 64, 1)
    assert (spec.data.max_prompt_tokens, spec.rollout.max_response_tokens) == (1024, 512)
    assert (spec.algorithm.advantage.estimator, spec.trainer.optimizer.learning_rate) == ("gae", 1e-6)
    assert spec.algorithm.critic is not None
    assert spec.algorithm.critic.learning_rate == 1e-5


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
