"""Tiny models of every family that the engines are tested with, and what an independent forward pass says of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from tiny_gemma import gemma
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 97


@pytest.fixture(autouse=True, scope="module")
def _ends_with_the_file() -> Iterator[None]:
    """What an engine of vLLM's changes of its process: with its environment torch compiles nothing, also in processes
    that later tests start, and with its function threads can't be set."""
    with mock.patch.dict(os.environ), mock.patch.object(torch, "set_num_threads", torch.set_num_threads):
        yield


def tiny(family: str, seed: int = 0, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """A random model with lively weights: the usual 0.02 would make nearly uniform distributions."""
    if family.startswith("gemma"):
        return gemma(family, vocabulary=vocabulary, seed=seed)
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model: PreTrainedModel
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
    elif family == "llama3":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        model = LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=rope, attention_bias=True, mlp_bias=True))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def reference_log_probs(
    model: PreTrainedModel, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float = 1.0
) -> np.ndarray:
    """Log-probs ``[T]`` of a response by transformers' own forward pass in float32."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0].float()
    logits = logits[len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).view(-1).numpy()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., PreTrainedModel]:
    return tiny


@pytest.fixture(scope="session")
def log_probs_of() -> Callable[..., np.ndarray]:
    return reference_log_probs


@pytest.fixture(scope="session")
def llama() -> PreTrainedModel:
    return tiny("llama")


@pytest.fixture(scope="session")
def llama_folder(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(folder)
    return folder
