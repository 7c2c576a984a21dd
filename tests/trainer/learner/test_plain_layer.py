"""Layers computed in rows, against transformers' own modules one sequence at a time, and against finite differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from rljob_trainer.learner.cpu.plain_layer import _rotated, _unit_norm, compute_in_rows, is_plain
from rljob_trainer.learner.models import PackedRow, load_policy
from rljob_trainer.learner.packing import build_row
from rljob_trainer.learner.prefixes import Lengths

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "mistral": {"sliding_window": 4, "head_dim": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "attention_bias": True},
}


@pytest.mark.parametrize("last_rows_only", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_transformers(family: str, last_rows_only: bool, tmp_path: Path) -> None:
    """With biases, scales and epsilons that are not what models begin with."""
    config = AutoConfig.for_model(family, rms_norm_eps=1e-2, **SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    ours = load_policy(tmp_path, dtype=torch.float64)
    compute_in_rows(ours.layers)
    assert all(is_plain(layer) for layer in ours.layers)

    prompts, responses, keys = np.array([5, 5, 5, 3, 7]), np.array([6, 1, 4, 9, 2]), np.array([0, 0, 0, 1, 2])
    ids = np.random.default_rng(0).integers(0, 50, int((prompts + responses).sum())).astype(np.int32)
    ends = np.cumsum(prompts + responses)
    for s in (1, 2):  # of one prompt
        ids[ends[s - 1] : ends[s - 1] + 5] = ids[:5]
    row = build_row(Lengths.of_groups(prompts, responses, keys), np.arange(5))
    packed = PackedRow.of(row, ids, CPU, torch.float64, outputs_only=last_rows_only)
    log_probs = ours(packed, 1.0).log_probs

    expected = []
    for s, prompt in enumerate(prompts):
        own = torch.from_numpy(ids[ends[s] - prompt - responses[s] : ends[s]].astype(np.int64))
        log_p = torch.log_softmax(theirs(own[None], use_cache=False).logits[0], -1)
        expected.append(log_p[prompt - 1 : -1].gather(1, own[prompt:, None])[:, 0])
    torch.testing.assert_close(log_probs, torch.cat(expected), rtol=0, atol=1e-5)  # their norms are in float32
    pull = torch.randn(len(log_probs), dtype=torch.float64)
    (log_probs * pull).sum().backward()
    (torch.cat(expected) * pull).sum().backward()
    of_theirs = dict(theirs.named_parameters())
    for name, parameter in ours.published():
        assert parameter.grad is not None
        assert float((parameter.grad - of_theirs[name].grad).norm() / of_theirs[name].grad.norm()) < 1e-5, name


def test_the_norm_and_its_gradient() -> None:
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(_unit_norm(x, 0.1), nn.functional.rms_norm(x, (6,), eps=0.1))
    assert torch.autograd.gradcheck(lambda rows: _unit_norm(rows, 0.1), x)


def test_the_rotation_and_its_gradient() -> None:
    x = torch.randn(5, 3 * 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(5, 4, dtype=torch.float64).repeat(1, 2)
    heads = x.view(1, 5, 3, 8).transpose(1, 2)
    expected, _ = apply_rotary_pos_emb(heads, heads, angles.cos()[None], angles.sin()[None])
    torch.testing.assert_close(_rotated(x, angles.cos(), angles.sin()), expected.transpose(1, 2).reshape(5, 24))
    assert torch.autograd.gradcheck(lambda rows: _rotated(rows, angles.cos(), angles.sin()), x)


def test_half_precision_keeps_the_layer_s_own_forward_pass(tied_folder: Path) -> None:
    """There a scale that is multiplied into the matrix would be rounded once more: bit for bit as before."""
    lengths = Lengths.of_groups(np.array([4, 3]), np.array([2, 5]), np.array([0, 1]))
    ids = np.arange(14, dtype=np.int32)
    row = build_row(lengths, np.arange(2))
    packed = PackedRow.of(row, ids, CPU, torch.bfloat16)
    policy = load_policy(tied_folder, dtype=torch.bfloat16)
    compute_in_rows(policy.layers)
    ours = policy(packed, 1.0).log_probs
    for layer in policy.layers:
        del layer.forward  # its class's is its own
    torch.testing.assert_close(policy(packed, 1.0).log_probs, ours, rtol=0, atol=0)


def test_a_layer_of_another_package_is_not_ours_to_compute() -> None:
    class LlamaDecoderLayer(nn.Module):
        pass

    assert not is_plain(LlamaDecoderLayer())
