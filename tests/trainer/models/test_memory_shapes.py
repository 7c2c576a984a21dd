"""The parameters that a plan of memory counts are those that transformers makes, and its rows those that are packed."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rljob_api.memory import ModelShape
from rljob_api.memory.adapter import AdapterShape
from rljob_api.memory.rows import LargestRow, largest_row
from rljob_api.memory.shape import numbers
from rljob_api.spec.model import Model
from rljob_trainer.learner.lora import adapt
from rljob_trainer.learner.models import Policy
from rljob_trainer.learner.packing import build_row
from rljob_trainer.learner.prefixes import Lengths
from rljob_trainer.learner.settings import LoraSettings
from rljob_trainer.models.materialise import materialise

SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 200,
    "vocab_size": 77,
}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}),
        ("llama", {"head_dim": 32, "tie_word_embeddings": True}),
        ("mistral", {"num_key_value_heads": 3, "head_dim": 16}),
        ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"num_key_value_heads": 1, "head_dim": 64}),
        ("qwen3_moe", {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 5, "moe_intermediate_size": 24}),
        ("gemma2", {"num_key_value_heads": 2, "head_dim": 16}),
        ("gemma3_text", {"num_key_value_heads": 1, "head_dim": 32, "attention_bias": True}),
        ("qwen3", {"attention_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    ],
)
def test_every_parameter_is_counted_with_its_shape(family: str, more: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **SIZES, **more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(config.to_dict())
    made = [tuple(parameter.shape) for parameter in model.parameters()]
    assert Counter(shape.tensors()) == Counter(made)
    assert shape.parameters == sum(map(math.prod, made))
    layer = [tuple(parameter.shape) for parameter in model.model.layers[0].parameters()]
    assert Counter(shape.layer_tensors()) == Counter(layer)
    # Cut into chunks as torch cuts, the first of which is the largest.
    assert numbers(made, 4) == sum(torch.empty(size, device="meta").chunk(4)[0].numel() for size in made)


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj"), ("mlp.up_proj", "layers.1.self_attn.o_proj")])
def test_an_adapters_matrices_are_those_that_peft_makes(targets: tuple[str, ...]) -> None:
    config = AutoConfig.for_model("qwen3", **SIZES, num_key_value_heads=2, head_dim=32)
    policy = Policy(AutoModelForCausalLM.from_config(config), None)
    adapt(policy, LoraSettings(4, 4, targets), seed=0)
    made = [tuple(p.shape) for p in policy.layers[1].parameters() if p.requires_grad]
    assert Counter(AdapterShape(4, targets).layer_tensors(ModelShape.from_config(config.to_dict()))) == Counter(made)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "qwen3_moe"])
def test_a_random_models_shape_is_that_of_the_model_that_is_built(family: str, tmp_path: Path) -> None:
    tokenizer = {"characters": "0123456789+="}
    spec = Model.model_validate(
        {"random": {"family": family, "hiddenSize": 64, "layers": 2, "heads": 2, "tokenizer": tokenizer}}
    )
    assert spec.random is not None
    shape = ModelShape.of_random(spec.random)
    assert shape is not None
    built = AutoModelForCausalLM.from_pretrained(materialise(spec, tmp_path / "model").path)
    assert Counter(shape.tensors()) == Counter(tuple(parameter.shape) for parameter in built.parameters())
    assert shape == ModelShape.from_config(built.config.to_dict())


@pytest.mark.parametrize(
    "row", [LargestRow(1, 30, 1, 50), LargestRow(2, 10, 8, 7), LargestRow(3, 5, 3, 9), LargestRow(1, 12, 4, 1)]
)
def test_a_row_has_as_many_tokens_as_the_packed_one(row: LargestRow) -> None:
    siblings = row.samples // row.groups
    keys = np.repeat(np.arange(row.groups), siblings)
    packed = build_row(
        Lengths.of_groups(np.full(row.samples, row.prompt), np.full(row.samples, row.response), keys),
        np.arange(row.samples),
    )
    assert row.tokens == len(packed.source)
    assert row.outputs == len(packed.targets)
    assert row.last == len(packed.last_rows)
    assert row.keys == sum(int(block.key_lengths.sum()) for block in packed.blocks)


@pytest.mark.parametrize("siblings", [1, 4, 16])
@pytest.mark.parametrize("budget", [40, 100, 150, 1000, 5000])
def test_the_largest_row_fills_the_budget_with_sequences_that_are_allowed(siblings: int, budget: int) -> None:
    prompt, response, share = 40, 60, 64
    row = largest_row(prompt, response, siblings, budget, share)
    assert row.response <= response
    assert row.samples <= min(share, row.groups * siblings)
    if prompt + response > budget:
        assert row == LargestRow(1, prompt, 1, response)
    elif row.samples < share:
        # A response's last token is not in the row; less than a token of each is lost by cutting evenly.
        assert budget - 2 * row.samples <= row.tokens <= budget
    else:
        assert row == LargestRow(64 // siblings, prompt, share, response)
