"""What is found wrong with a job's reward model or judge before it runs: its config.json tells."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rljob_api import Readable, Violation, load_jobs
from rljob_trainer.preflight import preflight

ONE_LABEL = {
    "architectures": ["LlamaForSequenceClassification"],
    # As transformers writes num_labels: 1.
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
}


def violations(edited: Callable[[str, str], Path], source: str) -> list[Violation]:
    file = edited("{type: gsm8k}", f"{{type: rewardModel, rewardModel: {{source: {source!r}}}}}")
    (job,) = load_jobs(file)
    return preflight(Readable(job), base=file.parent, code=[file.parent])


@pytest.mark.parametrize("source", ["scores", "./scores", "org/scores", "hf://org/scores", "pvc://claim/scores"])
def test_nothing_is_wrong(edited: Callable[[str, str], Path], folder: Path, source: str) -> None:
    (folder / "scores").mkdir()
    (folder / "scores" / "config.json").write_text(json.dumps(ONE_LABEL))
    assert violations(edited, source) == []


@pytest.mark.parametrize(
    ("source", "config", "problem"),
    [
        ("./absent", {}, "there is no folder"),
        ("http://host/scores", {}, "is not a valid location of a reward model"),
        ("scores", None, "has no config.json; use a Hugging Face model folder"),
        ("scores", {"architectures": ["LlamaForCausalLM"]}, "is a LlamaForCausalLM, which has no scoring head"),
        ("scores", {}, "is a model of unknown architecture"),
        # Two labels are what transformers leaves out of a config.json.
        ("scores", {"architectures": ONE_LABEL["architectures"]}, "has num_labels 2"),
        ("scores", ONE_LABEL | {"id2label": {"0": "a", "1": "b", "2": "c"}}, "has num_labels 3"),
    ],
)
def test_what_is_no_reward_model(
    edited: Callable[[str, str], Path], folder: Path, source: str, config: dict[str, Any] | None, problem: str
) -> None:
    (folder / "scores").mkdir()
    if config is not None:
        (folder / "scores" / "config.json").write_text(json.dumps(config))
    (violation,) = violations(edited, source)
    assert violation.path == "spec.reward.functions[0].rewardModel.source"
    assert problem in str(violation)
    assert violation.remedy


@pytest.mark.parametrize(
    ("source", "config", "problem"),
    [
        ("judge", {"architectures": ["LlamaForCausalLM"]}, None),
        ("org/judge", {}, None),
        ("pvc://claim/judge", {}, None),
        ("./absent", {}, "there is no folder"),
        ("http://host/judge", {}, "is not a valid location of a model that judges"),
        ("judge", None, "has no config.json; use a Hugging Face model folder"),
        ("judge", ONE_LABEL, "is a LlamaForSequenceClassification, which generates no text"),
    ],
)
def test_the_model_of_a_judge(
    edited: Callable[[str, str], Path], folder: Path, source: str, config: dict[str, Any] | None, problem: str | None
) -> None:
    (folder / "judge").mkdir()
    if config is not None:
        (folder / "judge" / "config.json").write_text(json.dumps(config))
    file = edited("{type: gsm8k}", "{type: judge, judge: {template: '{response}'}}")
    with file.open("a") as job_file:
        job_file.write(f"  judge: {{model: {{source: {source!r}}}}}\n")
    (job,) = load_jobs(file)
    found = preflight(Readable(job), base=file.parent, code=[file.parent])
    assert [violation.path for violation in found] == ([] if problem is None else ["spec.judge.model.source"])
    assert problem is None or problem in str(found[0])


def test_the_chat_template_of_a_judge_compiles(edited: Callable[[str, str], Path]) -> None:
    file = edited("{type: gsm8k}", "{type: judge, judge: {template: '{response}'}}")
    with file.open("a") as job_file:
        job_file.write("  judge: {model: {source: a/b, chatTemplate: '{% if %}'}}\n")
    (job,) = load_jobs(file)
    found = preflight(Readable(job), base=file.parent, code=[file.parent])
    assert [violation.path for violation in found] == ["spec.judge.model.chatTemplate"]
    assert "is not a Jinja template" in str(found[0])


@pytest.mark.parametrize(
    ("source", "config", "problem"),
    [
        ("model", {}, None),
        ("org/critic", {}, None),
        ("pvc://claim/critic", {}, None),
        ("./absent", {}, "there is no folder"),
        ("http://host/critic", {}, "is not a valid location of a model"),
        ("critic", {}, None),
        ("critic", {"architectures": ["LlamaForTokenClassification"]}, "is a LlamaForTokenClassification"),
        ("critic", {"architectures": ["LlamaForSequenceClassification"]}, "has num_labels 2"),
        ("critic", ONE_LABEL, "head score.weight [1, 128] is missing"),
        ("critic", {"max_position_embeddings": 255}, "its context is 255 tokens"),
        ("critic", {"vocab_size": 17}, "requires [17, 128]"),
        ("critic", {"model_type": "granite"}, "the learner supports the model types"),
    ],
)
def test_what_a_critic_starts_from(
    edited: Callable[[str, str], Path], folder: Path, source: str, config: dict[str, Any], problem: str | None
) -> None:
    shutil.copytree(folder / "model", folder / "critic")
    told = json.loads((folder / "critic" / "config.json").read_text())
    (folder / "critic" / "config.json").write_text(json.dumps(told | config))
    file = edited("{preset: grpo}", f"{{preset: ppo, critic: {{model: {{source: {source!r}}}}}}}")
    (job,) = load_jobs(file)
    found = preflight(Readable(job), base=file.parent, code=[file.parent])
    assert [violation.path for violation in found] == (
        [] if problem is None else ["spec.algorithm.critic.model.source"]
    )
    assert problem is None or problem in str(found[0])
    assert all(violation.remedy for violation in found)


def test_a_critic_with_fewer_rows_than_the_policy(edited: Callable[[str, str], Path], folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "critic")
    stored = load_file(folder / "model" / "model.safetensors")
    stored["model.embed_tokens.weight"] = np.zeros((18, 128), np.float32)
    save_file(stored, folder / "model" / "model.safetensors")
    told = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(told | {"vocab_size": 18}))
    file = edited("{preset: grpo}", "{preset: ppo, critic: {model: {source: critic}}}")
    (job,) = load_jobs(file)
    (violation,) = preflight(Readable(job), base=file.parent, code=[file.parent])
    assert "its embedding has 16 rows, but the policy's has 18" in str(violation)
