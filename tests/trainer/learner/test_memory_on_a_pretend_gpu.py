"""The memory that a plan foretells is what torch counts of the real rank on a GPU that is not there.

Fake tensors have no numbers, so models of 7B with rows of 30,000 tokens run in seconds. What is counted are storages,
by torch's own tracker; no number here comes from the plan's formulas.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.memory.jobs import DAPO, JOBS, PPO_7B_CHECKPOINTING, Example, config_of, fullest, measure
from benchmarks.memory.pretend_gpu import PretendGpu, batch_of

from rljob_api.memory import ModelShape, parts
from rljob_api.memory.activations import gpu_chunk
from rljob_api.memory.adapter import AdapterShape
from rljob_api.memory.rows import LargestRow
from rljob_api.memory.trainer import ShardLayout, TrainerRank
from rljob_trainer.learner.settings import LearnerSettings, LoraSettings, OptimizerSettings

MEMORY = 80 << 30
LAYERS = 3
"""Of each model: the last, which computes less, the first, behind which none is gathered, and one between."""


# Others are like one of these in all that a rank's memory depends on.
@pytest.mark.slow(stands_for="[gsm8k.yaml]")
@pytest.mark.parametrize(
    "files",
    [
        ["gsm8k.yaml"],
        ["one-step-off.yaml"],
        ["code/deepcoder-7b.yaml"],
        ["llm-judge/helpful-7b.yaml"],
        ["retool/retool-7b.yaml"],
        *([f"{DAPO}/base.yaml", f"{DAPO}/{split}.yaml"] for split in ("4-4", "4-12", "64-64")),
    ],
    ids=lambda files: files[-1],
)
def test_of_each_example_that_is_for_gpus(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    counted, rank = measure(Example(files).resolved(), PretendGpu(monkeypatch), MEMORY, LAYERS)
    assert fullest(rank) == pytest.approx(counted.peak, rel=0.03)


@pytest.mark.slow(stands_for="[True]")
@pytest.mark.parametrize("offload", [False, True])
def test_of_ppo_at_7b_on_four_gpus(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With offload the reference rests during an update, and critic, actor and their moments do not: each mini-batch
    has a step of both."""
    job = JOBS[PPO_7B_CHECKPOINTING].resolved(offload=offload)
    counted, rank = measure(job, PretendGpu(monkeypatch), MEMORY, LAYERS)
    assert fullest(rank) == pytest.approx(counted.peak, rel=0.03)
    own = rank.at_rest()
    # Between updates the actor alone is there.
    state = own[parts.MASTERS] if offload else sum(own.values())
    assert state == pytest.approx(counted.state, rel=0.01)


SMALL = ModelShape("qwen3", 1024, LAYERS, 16, 8, 128, 3072, 30000, tied=True)
WIDE = ModelShape("llama", 2048, LAYERS, 32, 8, 64, 8192, 16000, tied=False)
NARROW = replace(SMALL, vocabulary=1000)
GEMMA2 = ModelShape("gemma2", 1152, LAYERS, 8, 4, 128, 4608, 60000, tied=True, caps_scores=True, caps_logits=True)
GEMMA3 = ModelShape("gemma3_text", 1152, LAYERS, 4, 1, 256, 6912, 60000, tied=True)


MIXTURE = ModelShape(
    "qwen3_moe", 512, LAYERS, 8, 4, 64, 1024, 8000, tied=False, experts=16, experts_per_token=4, expert_width=256
)
MANY = replace(MIXTURE, experts=128)


@pytest.mark.slow(stands_for=["[shape1-2-changes1]", "[shape4-8-changes4]"])
@pytest.mark.parametrize(
    ("shape", "ranks", "changes"),
    [
        (SMALL, 1, {}),
        (SMALL, 2, {"checkpointing": True, "critic": True}),
        (WIDE, 8, {"checkpointing": True, "reference": True}),
        (WIDE, 4, {"replicate": 2}),
        (WIDE, 8, {"context": 4}),
        (SMALL, 8, {"context": 2, "replicate": 2, "checkpointing": True}),
        (SMALL, 4, {"tensor": 2, "checkpointing": True, "critic": True}),
        (NARROW, 2, {"tensor": 2, "muon": True, "few": True}),
        (GEMMA2, 1, {}),
        (GEMMA2, 2, {"checkpointing": True, "critic": True}),
        (GEMMA2, 2, {"alone": True, "checkpointing": True}),
        (GEMMA2, 4, {"few": True}),
        (GEMMA3, 1, {}),
        (GEMMA3, 2, {"checkpointing": True, "critic": True}),
        (GEMMA3, 4, {"few": True}),
        (MIXTURE, 1, {}),
        (MIXTURE, 2, {"chunk": 64}),
        (MIXTURE, 4, {"chunk": 64, "checkpointing": True, "critic": True}),
        (MIXTURE, 8, {"chunk": 64, "context": 4, "checkpointing": True}),
        (MANY, 1, {"few": True, "checkpointing": True}),
        (MANY, 4, {"few": True}),
        (SMALL, 1, {"few": True}),
        (SMALL, 2, {"few": True}),
        (NARROW, 1, {"muon": True, "few": True}),
        (NARROW, 4, {"muon": True, "few": True}),
    ],
)
def test_of_other_families_layouts_and_methods(
    shape: ModelShape, ranks: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = dict(changes)
    replicate, context, tensor = (changes.pop(name, 1) for name in ("replicate", "context", "tensor"))
    few = changes.pop("few", False)
    row = LargestRow(1, 64, 2, 32) if few else LargestRow(2, 512, 16, 1024)
    row = replace(row, groups=row.samples) if changes.pop("alone", False) else row
    layout = ShardLayout(ranks // replicate // context // tensor, replicate, context, tensor)
    rank = TrainerRank(shape, layout, row, 2, memory=MEMORY, **changes)
    optimizer = OptimizerSettings(kind="muon" if rank.muon else "adamw")
    settings = LearnerSettings(
        Path("nowhere"),
        dtype="bfloat16",
        ranks=ranks,
        replicate=replicate,
        context=context,
        tensor=tensor,
        actor=optimizer,
        critic=optimizer if rank.critic else None,
        reference=rank.reference,
        activation_checkpointing=rank.checkpointing,
        log_prob_chunk_tokens=rank.head_chunk,
    )
    batch = batch_of(row.groups, row.prompt, row.samples // row.groups, row.response)
    counted = PretendGpu(monkeypatch).update(config_of(shape), settings, batch)
    assert fullest(rank) == pytest.approx(counted.peak, rel=0.03)


ALL = AdapterShape(32)


@pytest.mark.slow(stands_for="[shape1-2-adapter1-changes1]")
@pytest.mark.parametrize(
    ("shape", "ranks", "adapter", "changes"),
    [
        (SMALL, 1, ALL, {}),
        (WIDE, 2, ALL, {"checkpointing": True}),
        (WIDE, 2, AdapterShape(64, ("q_proj", "v_proj")), {}),
        (SMALL, 4, AdapterShape(16, ("mlp.down_proj",)), {"checkpointing": True}),
        (SMALL, 2, ALL, {"critic": True, "checkpointing": True}),
        (NARROW, 1, ALL, {"muon": True}),
        (NARROW, 4, ALL, {}),
        (GEMMA2, 1, ALL, {"checkpointing": True}),
        (GEMMA3, 1, ALL, {}),
        (MIXTURE, 2, ALL, {"chunk": 64}),
    ],
)
def test_of_adapters(
    shape: ModelShape, ranks: int, adapter: AdapterShape, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = LargestRow(2, 512, 16, 1024)
    rank = TrainerRank(shape, ShardLayout(ranks), row, 2, memory=MEMORY, adapter=adapter, **changes)
    optimizer = OptimizerSettings(kind="muon" if rank.muon else "adamw")
    settings = LearnerSettings(
        Path("nowhere"),
        dtype="bfloat16",
        ranks=ranks,
        actor=optimizer,
        critic=optimizer if rank.critic else None,
        lora=LoraSettings(adapter.rank, adapter.rank, adapter.targets),
        activation_checkpointing=rank.checkpointing,
        log_prob_chunk_tokens=rank.head_chunk,
    )
    counted = PretendGpu(monkeypatch).update(config_of(shape), settings, batch_of(2, 512, 8, 1024))
    assert sum(rank.at_rest().values()) == pytest.approx(counted.state, rel=0.01)
    assert fullest(rank) == pytest.approx(counted.peak, rel=0.03)


@pytest.mark.slow(stands_for="[shape0-2]")
@pytest.mark.parametrize(
    ("shape", "ranks"),
    [(SMALL, 2), (WIDE, 1), (NARROW, 4), (GEMMA2, 1), (GEMMA3, 2), (replace(MIXTURE, vocabulary=50), 2)],
)
def test_of_scoring(shape: ModelShape, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = LargestRow(2, 512, 16, 1024)
    rank = TrainerRank(shape, ShardLayout(ranks), row, 2, memory=MEMORY)
    chunk = gpu_chunk(shape.vocabulary, MEMORY)
    settings = LearnerSettings(Path("nowhere"), dtype="bfloat16", ranks=ranks, log_prob_chunk_tokens=chunk)
    counted = PretendGpu(monkeypatch).scoring_peak(config_of(shape), settings, batch_of(2, 512, 8, 1024))
    foretold = max(moment.total for moment in rank.all() if moment.name.startswith("score"))
    assert foretold == pytest.approx(counted, rel=0.03)
