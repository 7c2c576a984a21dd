"""Tiny models of the Gemma families with all that sets them apart: windows that cut, caps that press, two rotations."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

WINDOW = 5


def gemma(family: str, *, vocabulary: int, seed: int = 0, **extra: Any) -> PreTrainedModel:
    """Random, with lively weights and norms. Of three layers the second sees everything; a head is as wide as vLLM
    wants, and scores are divided by another root than its width's. The caps are so low that they matter."""
    of_family: dict[str, Any] = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}
    if family == "gemma3_text":
        of_family = {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            }
        }
    config = AutoConfig.for_model(
        family,
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=12,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **of_family | extra,
    )
    torch.manual_seed(seed)
    # The only attention of transformers that knows a cap.
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(-0.5, 0.5)
    return model.eval()
