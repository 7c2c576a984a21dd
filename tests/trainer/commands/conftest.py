"""A job with everything it names, in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

JOB = """\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata:
  name: tiny
spec:
  model: {source: ./model}
  data:
    train: {source: train.jsonl}
    prompt: question
    answer: answer
    maxPromptTokens: 100
  reward: {functions: [{type: gsm8k}]}
  algorithm: {preset: grpo}
  rollout: {maxResponseTokens: 156}
"""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 256,
    "vocab_size": 16,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}

LAYER = "model.layers.0."
TENSORS = {
    "model.embed_tokens.weight": (16, 128),
    "model.norm.weight": (128,),
    LAYER + "input_layernorm.weight": (128,),
    LAYER + "post_attention_layernorm.weight": (128,),
    LAYER + "self_attn.q_proj.weight": (128, 128),
    LAYER + "self_attn.k_proj.weight": (64, 128),
    LAYER + "self_attn.v_proj.weight": (64, 128),
    LAYER + "self_attn.o_proj.weight": (128, 128),
    LAYER + "mlp.gate_proj.weight": (256, 128),
    LAYER + "mlp.up_proj.weight": (256, 128),
    LAYER + "mlp.down_proj.weight": (128, 256),
}
"""As transformers names and shapes them for this configuration."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model without values, training data and the job file ``job.yaml``."""
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models

    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: np.zeros(shape, np.float32) for name, shape in TENSORS.items()}, str(model / "model.safetensors"))
    Tokenizer(models.WordLevel({str(i): i for i in range(16)}, unk_token="0")).save(str(model / "tokenizer.json"))
    (tmp_path / "train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n' * 3)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.fixture
def edited(folder: Path) -> Callable[[str, str], Path]:
    """``edited(old, new)``: the job file with one piece of text replaced."""

    def edit(old: str, new: str) -> Path:
        file = folder / "job.yaml"
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))
        return file

    return edit
