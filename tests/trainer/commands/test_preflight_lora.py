"""Layers that are to have an adapter and that the model has not: its files tell before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_job import copy_job
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rljob_api import Readable, Violation, load_jobs
from rljob_api.spec.model import Model, RandomModel, RandomTokenizer
from rljob_trainer.models import materialise
from rljob_trainer.preflight.lora import check_lora


def found(folder: Path, model: dict[str, Any], *targets: str) -> list[Violation]:
    engine = "vllm" if model.get("random", {}).get("family") == "qwen3_moe" else "torch"
    rollout = {"engine": engine, "maxResponseTokens": 3}
    job = copy_job(model={**model, "lora": {"targets": list(targets)}}, rollout=rollout)
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    (read,) = load_jobs(folder / "job.yaml")
    return list(check_lora(Readable(read), folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a dense model and one of experts, whose matrices lie in other places."""
    folder = tmp_path_factory.mktemp("models")
    random = RandomModel(hiddenSize=32, layers=1, heads=1, contextLength=16, tokenizer=RandomTokenizer(characters="01"))
    materialise(Model(random=random), folder / "dense")
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts=2,
        head_dim=32,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "experts")
    return folder


@pytest.mark.parametrize("source", ["dense", "experts"])
@pytest.mark.parametrize("targets", [(), ("q_proj",), ("self_attn.q_proj", "v_proj")])
def test_layers_that_are_there(folder: Path, source: str, targets: tuple[str, ...]) -> None:
    assert found(folder, {"source": source}, *targets) == []


@pytest.mark.parametrize("target", ["mlp.q_proj", "lm_head", "qproj", "input_layernorm", "proj"])
def test_a_layer_that_is_not_there(folder: Path, target: str) -> None:
    for model in ({"source": "dense"}, {"random": copy_job()["spec"]["model"]["random"]}):
        (violation,) = found(folder, model, "q_proj", target)
        assert violation.path == "spec.model.lora.targets"
        told = f"has a matrix called {target}; it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
        assert told in str(violation)
        assert violation.remedy == ("did you mean q_proj?" if target == "qproj" else violation.remedy)


@pytest.mark.parametrize("target", ["gate_proj", "gate", "experts.0.up_proj"])
def test_experts_and_routers_are_no_layers_of_their_own(folder: Path, target: str) -> None:
    random = {**copy_job()["spec"]["model"]["random"], "family": "qwen3_moe"}
    for model in ({"source": "experts"}, {"random": random}):
        (violation,) = found(folder, model, "q_proj", target)
        assert f"has a matrix called {target}; it has k_proj, o_proj, q_proj, v_proj" in str(violation)


def test_a_model_that_is_not_here_is_left_to_the_run(folder: Path) -> None:
    assert found(folder, {"source": "owner/name"}, "whatever") == []
