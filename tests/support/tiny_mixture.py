"""A tiny mixture of experts whose routers have opinions, and its log-probs by transformers' own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.prefixes import offsets_of
from rljob_trainer.learner.protocol import SequenceBatch
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.work import Share, cut

EXPERTS, CHOSEN = 8, 2
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"micro_batch_tokens": 60, "activation_checkpointing": True},
    {"ranks": 2, "micro_batch_tokens": 60},
    {"ranks": 4, "context": 2, "replicate": 2, "activation_checkpointing": True},
]
"""Changes of ``LearnerSettings``: several rows, ranks, and ranks of a row. On four ranks there are more of them than
some layers' experts use."""


def mixture(vocabulary: int, seed: int = 0) -> PreTrainedModel:
    """Three layers, of which the second is dense."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def log_probs_of(model: PreTrainedModel, batch: SequenceBatch, temperature: float) -> torch.Tensor:
    """Of the response tokens ``[tokens]``, each sequence by itself."""
    starts = offsets_of(batch.prompt_lengths + batch.response_lengths)
    parts = []
    for s, prompt in enumerate(batch.prompt_lengths.tolist()):
        ids = torch.from_numpy(batch.token_ids[starts[s] : starts[s + 1]].astype(np.int64))
        log_p = torch.log_softmax(model(ids[None], use_cache=False).logits[0] / temperature, -1)
        parts.append(log_p[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0])
    return torch.cat(parts)


def mixture_folder(folder: Path, vocabulary: int, tokenizer: Path) -> Path:
    """``folder`` with the model, and the tokenizer of another folder."""
    mixture(vocabulary).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder


def share_of(rank: int, settings: LearnerSettings, batch: SequenceBatch) -> Share:
    """What a rank gets of the batch as one mini-batch."""
    backend = Fsdp2()
    return cut(batch, [range(len(batch))], backend.placement(settings), backend.rules(settings)).sent()[rank]
