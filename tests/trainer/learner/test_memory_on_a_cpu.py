"""The memory that a plan foretells is what torch's allocator gives out in real updates of tiny models on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.memory.rows import batch_of
from cut_for import cut_for
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from rljob_api.memory import ModelShape
from rljob_api.memory.rows import LargestRow
from rljob_api.memory.trainer import ShardLayout, TrainerRank
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.protocol import LossSettings, UpdateRequest
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 50,
    "tie_word_embeddings": True,
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "vocab_size": 4000,
    "tie_word_embeddings": False,
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 384,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}


def allocated(run: profile) -> Iterator[int]:
    """Bytes beyond those at the beginning, after each time that the allocator gave or took."""
    present = 0
    assert run.profiler is not None
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            present += event.nbytes()
            yield present


@pytest.mark.slow(stands_for=["[config0-row0-changes0]", "[config4-row4-changes4]"])
@pytest.mark.parametrize(
    ("config", "row", "changes"),
    [
        (LLAMA, LargestRow(4, 20, 32, 30), {}),
        (LLAMA, LargestRow(4, 20, 32, 30), {"checkpointing": True}),
        (LLAMA, LargestRow(1, 2, 4, 4), {"muon": True}),
        (QWEN2, LargestRow(2, 100, 8, 200), {}),
        (QWEN2, LargestRow(1, 300, 1, 700), {"chunk": 64}),
        (QWEN2, LargestRow(2, 100, 8, 200), {"reference": True, "full_kl": True, "chunk": 256}),
        (QWEN3, LargestRow(2, 100, 8, 200), {}),
        (QWEN3, LargestRow(2, 100, 8, 200), {"checkpointing": True, "critic": True}),
    ],
)
def test_of_an_update(config: dict[str, Any], row: LargestRow, changes: dict[str, Any], tmp_path: Path) -> None:
    family = {name: value for name, value in config.items() if name != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **family, max_position_embeddings=4096)
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    plan = TrainerRank(ModelShape.from_config(config), ShardLayout(), row, 4, on_cpu=True, **changes)
    optimizer = OptimizerSettings(kind="muon" if plan.muon else "adamw")
    settings = LearnerSettings(
        tmp_path,
        actor=optimizer,
        critic=optimizer if plan.critic else None,
        reference=plan.reference,
        activation_checkpointing=plan.checkpointing,
        log_prob_chunk_tokens=plan.chunk,
        lanes=1,
    )
    rank = Fsdp2().start(settings)
    batch = batch_of(row.groups, row.prompt, row.samples // row.groups, row.response)
    share = cut_for(batch, [range(len(batch))], ranks=1, token_budget=1 << 40).shares[0]
    share.micro_batches[0] *= 2
    loss = LossSettings(kl_kind="full", kl_coefficient=0.1) if plan.full_kl else LossSettings()
    gc.collect()  # what earlier tests left would go meanwhile, and count as given back
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        rank.update(share, loss, UpdateRequest(update_critic=plan.critic))
    trained = [rank.actor] if rank.critic is None else [rank.actor, rank.critic]
    before = sum(shard.tensor.nbytes for part in trained for shard in part.state())
    if plan.reference:
        before += sum(parameter.nbytes for parameter in rank.actor.module.parameters())
    foretold = max(moment.total for moment in plan.all() if not moment.name.startswith("score"))
    assert foretold == pytest.approx(before + max(allocated(run)), rel=0.05)
