"""What a Gemma's configuration means, in the forms that are published, is what transformers makes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gemma import gemma
from transformers import AutoConfig, AutoModelForCausalLM

from rljob_trainer.errors import JobFileError
from rljob_trainer.models import read_folder
from rljob_trainer.models.config import (
    check_config,
    layer_types,
    ropes,
    soft_caps,
    unsupported_by_learner,
    unsupported_by_torch_engine,
)
from rljob_trainer.rollout.decoder import DecoderConfig

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 50,
    "max_position_embeddings": 512,
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-2-2b-it": {
        "model_type": "gemma2",
        "num_hidden_layers": 5,
        "hidden_act": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "rope_theta": 10_000.0,
        "cache_implementation": "hybrid",
    },
    "gemma-2, caps unsaid": {"model_type": "gemma2", "num_hidden_layers": 2},
    "gemma-2, caps off": {
        "model_type": "gemma2",
        "num_hidden_layers": 2,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gemma-3-1b-it": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 13,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1_000_000,
        "rope_local_base_freq": 10_000,
        "rope_scaling": None,
        "sliding_window_pattern": 6,
    },
    "gemma-3-4b's text part": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "gemma-3, every third": {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window_pattern": 3},
    "gemma-2, a pattern of gemma-3": {
        "model_type": "gemma2",
        "num_hidden_layers": 7,
        "sliding_window_pattern": 3,
    },
    "gemma-3, angles of no type of layer": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 33.0},
    },
    "gemma-3, a scaling added to a file of transformers 5": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 9e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 8e3},
        },
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "gemma-3, an old name of the scaling's type": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "type": "linear"},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_forms_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    said = SIZES | PUBLISHED[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(said))
    config = AutoConfig.from_pretrained(tmp_path)
    check_config(said, file)
    assert unsupported_by_learner(said) is None
    assert layer_types(said) == config.layer_types
    assert soft_caps(said) == (config.attn_logit_softcapping, config.final_logit_softcapping)
    theirs = config.rope_parameters
    if said["model_type"] == "gemma2":
        theirs = {"full_attention": theirs, "sliding_attention": theirs}
    ours = ropes(said)
    for kind in ours:
        for key, value in theirs[kind].items():
            assert ours[kind][key] == value, (kind, key)
    # Whatever form it is in, the engine computes the same.
    assert DecoderConfig.from_hf(said) == DecoderConfig.from_hf(config.to_dict())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_scaling_that_was_added_to_a_file_of_transformers_5(family: str, tmp_path: Path) -> None:
    """It has the file's angles under another name already. What the learner computes with, the engine must too."""
    added = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    said = SIZES | {
        "model_type": family,
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": added,
    }
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == added
    assert dict(ropes(said)["full_attention"]) == added
    said["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert unsupported_by_torch_engine(said) is not None


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "attention to later tokens"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention to later tokens"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping in models of the type gemma3_text"),
        ("gemma2", {"tie_word_embeddings": False}, "supports gemma2 only with tied embeddings"),
        ("gemma2", {"layer_types": ["full_attention", "chunked_attention"]}, "layers of the type 'chunked_att"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping in models of the type llama"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping in models of the type llama"),
        ("qwen3", {"logit_scale": 0.5}, "does not support logit_scale"),
        ("llama", {"is_causal": False}, "attention to later tokens"),
        (
            "gemma3",
            {},
            r"supports the model types .*gemma3_text, qwen3_moe, but .* 'gemma3' \(of Gemma 3 only the text models",
        ),
        (
            "granite",
            {},
            "supports the model types llama, mistral, qwen2, qwen3, gemma2, gemma3_text, qwen3_moe, but .* 'granite'",
        ),
    ],
)
def test_what_nobody_here_computes_is_refused_by_name(family: str, changes: dict[str, Any], problem: str) -> None:
    said = SIZES | {"model_type": family, "num_hidden_layers": 2} | changes
    found = unsupported_by_learner(said)
    assert found is not None
    assert re.search(problem, found)
    if family not in ("gemma3", "granite"):
        assert unsupported_by_learner({name: said[name] for name in said if name not in changes}) is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"head_dim": None}, "head_dim must be a number above 0"),
        ({"query_pre_attn_scalar": None}, "query_pre_attn_scalar must be a number above 0"),
        ({"query_pre_attn_scalar": -3}, "query_pre_attn_scalar must be a number above 0"),
        ({"sliding_window": None}, "sliding_window must be"),
        ({"final_logit_softcapping": "30"}, "final_logit_softcapping must be a number above 0"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number above 0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 0}}}, "rope_parameters.full_attention.rope_theta must"),
        ({"rope_parameters": {"sliding_attention": 3}}, "rope_parameters.sliding_attention must be an object"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    said = SIZES | PUBLISHED["gemma-3-1b-it"] | changes
    with pytest.raises(JobFileError, match=problem):
        check_config(said, tmp_path / "config.json")


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_every_tensor_of_a_folder_is_known(family: str, tmp_path: Path) -> None:
    gemma(family, vocabulary=50).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))
    made = read_folder(tmp_path, tokenizer=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert made.parameters == sum(p.numel() for p in model.parameters())
    assert (made.tied, made.untrainable, made.unsupported) == (True, None, None)
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))
    assert read_folder(tmp_path, tokenizer=False).tied
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if "layers.1." in n and "norm" in n]:
        save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "model.safetensors")
        with pytest.raises(JobFileError, match=f"lacks the tensor {name}"):
            read_folder(tmp_path, tokenizer=False)
