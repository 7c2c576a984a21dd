"""The memory that a plan foretells is what torch counts of the real rank on a GPU that is not there.

Fake tensors have no numbers, so models of 7B with rows of 30,000 tokens run in seconds. What is counted are storages,
by torch's own tracker; no number here comes from the plan's formulas.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.memory.examples import Example, config_of, fullest
from benchmarks.memory.jobs import DAPO, JOBS, PPO_7B_CHECKPOINTING, measure
from benchmarks.memory.pretend_gpu import Counted, PretendGpu
from benchmarks.memory.rows import batch_of

from rljob_api.memory import ModelShape, parts
from rljob_api.memory.activations import gpu_chunk
from rljob_api.memory.adapter import AdapterShape
from rljob_api.memory.rows import LargestRow
from rljob_api.memory.trainer import ShardLayout, TrainerRank
from rljob_trainer.learner.attention import Varlen
from rljob_trainer.learner.packing import build_row
from rljob_trainer.learner.prefixes import Lengths
from rljob_trainer.learner.settings import LearnerSettings, LoraSettings, OptimizerSettings

MEMORY = 80 << 30
LAYERS = 3
"""Of each model: the last, which computes less, the first, behind which none is gathered, and one between."""


KEPT = (parts.FROZEN, parts.MASTERS, parts.OPTIMIZER, parts.CRITIC, parts.REFERENCE)
"""What a rank has throughout an update."""


def agree(rank: TrainerRank, counted: Counted) -> None:
    """Peak and parts of an update, which are found by looking at the real rank's tensors."""
    assert fullest(rank) == pytest.approx(counted.peak, rel=0.03)
    assert sum(counted.parts.values()) == counted.peak
    planned = max((moment for moment in rank.all() if not moment.name.startswith("score")), key=lambda m: m.total).parts
    # A step's count is four bytes for each parameter, and a part that is cut among ranks may be a row longer.
    kept = {name: planned.get(name, 0) for name in KEPT}
    assert {name: counted.parts.get(name, 0) for name in KEPT} == pytest.approx(kept, rel=0.01, abs=1 << 16)
    # Some of the plan's are those of one layer, before they are summed.
    assert counted.parts.get(parts.GRADIENTS, 0) <= planned.get(parts.GRADIENTS, 0) * 1.01 + (1 << 16)


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
    agree(rank, counted)


@pytest.mark.slow(stands_for="[True]")
@pytest.mark.parametrize("offload", [False, True])
def test_of_ppo_at_7b_on_four_gpus(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With offload the reference rests during an update, and critic, actor and their moments do not: each mini-batch
    has a step of both."""
    job = JOBS[PPO_7B_CHECKPOINTING].resolved(offload=offload)
    counted, rank = measure(job, PretendGpu(monkeypatch), MEMORY, LAYERS)
    agree(rank, counted)
    own = rank.at_rest()
    # Between updates the actor alone is there.
    state = own[parts.MASTERS] if offload else sum(own.values())
    assert state == pytest.approx(counted.state, rel=0.01)


SMALL = ModelShape("qwen3", 1024, LAYERS, 16, 8, 128, 3072, 30000, tied=True)
WIDE = ModelShape("llama", 2048, LAYERS, 32, 8, 64, 8192, 16000, tied=False)
NARROW = replace(SMALL, vocabulary=1000)
GEMMA2 = ModelShape("gemma2", 1152, LAYERS, 4, 2, 256, 4608, 60000, tied=True, caps_scores=True, caps_logits=True)
GEMMA3 = ModelShape("gemma3_text", 1152, LAYERS, 4, 1, 256, 6912, 60000, tied=True)


MIXTURE = ModelShape(
    "qwen3_moe", 512, LAYERS, 8, 4, 64, 1024, 8000, tied=False, experts=16, experts_per_token=4, expert_width=256
)
MANY = replace(MIXTURE, experts=128)
BRIEF = replace(MIXTURE, vocabulary=1000)
"""Whose logits are fewer bytes than its experts in chunks of 512 rows, of which there are not too many to count."""


# Each shape, layout and method in which a rank's memory differs, and each two of them that meet in one moment: a family
# that stands here on several ranks or with checkpointing is without them below, where it has an adapter.
def settings_of(rank: TrainerRank) -> LearnerSettings:
    """What a learner is told whose ranks are like this one, in bfloat16."""
    optimizer = OptimizerSettings(kind="muon" if rank.muon else "adamw")
    adapter, layout = rank.adapter, rank.layout
    return LearnerSettings(
        Path("nowhere"),
        dtype="bfloat16",
        ranks=layout.ranks,
        replicate=layout.replicate,
        context=layout.context,
        tensor=layout.tensor,
        actor=optimizer,
        critic=optimizer if rank.critic else None,
        reference=rank.reference,
        lora=None if adapter is None else LoraSettings(adapter.rank, adapter.rank, adapter.targets),
        activation_checkpointing=rank.checkpointing,
        log_prob_chunk_tokens=rank.head_chunk,
    )


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
        (BRIEF, 4, {"chunk": 512, "checkpointing": True, "critic": True}),
        (BRIEF, 8, {"chunk": 512, "context": 4, "checkpointing": True}),
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
    settings = settings_of(rank)
    batch = batch_of(row.groups, row.prompt, row.samples // row.groups, row.response)
    counted = PretendGpu(monkeypatch).update(config_of(shape), settings, batch)
    agree(rank, counted)


@pytest.mark.slow(stands_for="[shape1-critic1-4-changes1]")
@pytest.mark.parametrize(
    ("shape", "critic", "ranks", "changes"),
    [
        (SMALL, WIDE, 1, {"checkpointing": True, "reference": True}),
        (WIDE, SMALL, 4, {}),
        (SMALL, GEMMA2, 2, {"tensor": 2}),
        (NARROW, replace(WIDE, layers=6), 2, {"muon": True}),
    ],
)
def test_of_a_critic_that_starts_from_another_model(
    shape: ModelShape, critic: ModelShape, ranks: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = dict(changes)
    tensor = changes.pop("tensor", 1)
    layout = ShardLayout(ranks // tensor, tensor=tensor)
    rank = TrainerRank(
        shape, layout, LargestRow(2, 512, 16, 1024), 2, memory=MEMORY, critic=True, critic_shape=critic, **changes
    )
    settings = settings_of(rank)
    batch = batch_of(2, 512, 8, 1024)
    counted = PretendGpu(monkeypatch).update(config_of(shape), settings, batch, critic=config_of(critic))
    assert sum(rank.at_rest().values()) == pytest.approx(counted.state, rel=0.01)
    agree(rank, counted)


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
        (BRIEF, 2, ALL, {"chunk": 512}),
    ],
)
def test_of_adapters(
    shape: ModelShape, ranks: int, adapter: AdapterShape, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = LargestRow(2, 512, 16, 1024)
    rank = TrainerRank(shape, ShardLayout(ranks), row, 2, memory=MEMORY, adapter=adapter, **changes)
    settings = settings_of(rank)
    counted = PretendGpu(monkeypatch).update(config_of(shape), settings, batch_of(2, 512, 8, 1024))
    assert sum(rank.at_rest().values()) == pytest.approx(counted.state, rel=0.01)
    agree(rank, counted)


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


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("shape", "siblings", "response"), [(SMALL, 8, 300), (WIDE, 1, 700), (MIXTURE, 4, 2), (GEMMA3, 1, 40)]
)
def test_what_attention_s_kernel_takes_for_itself_is_planned(
    shape: ModelShape, siblings: int, response: int, deterministic: bool
) -> None:
    """The tensors that PyTorch's ``mha_varlen_bwd`` makes, for the segments that the learner gives it. The pretended
    GPU runs no kernel, so nobody counts them there."""
    groups, prompt = 2, 100
    lengths = np.full(groups * siblings, prompt), np.full(groups * siblings, response)
    row = build_row(Lengths.of_groups(*lengths, np.arange(groups).repeat(siblings)), np.arange(groups * siblings))
    varlen = Varlen.of(row.blocks, len(row.source))
    total_q, total_k = len(row.source), int(varlen.cu_keys[-1])
    batch, heads, width = len(varlen.cu_queries) - 1, shape.heads, shape.head_width
    padded = total_q + 128 * batch
    rounded = {64: 64, 128: 128, 256: 256}[width]
    splits = -(-148 // (batch * heads)) if deterministic else 1
    made = [
        torch.empty(heads, padded, device="meta"),
        torch.empty(splits, padded, heads, rounded, device="meta"),
        *(torch.empty(total_k, heads, width, dtype=torch.bfloat16, device="meta") for _ in range(2)),
    ]
    largest = LargestRow(groups, prompt, groups * siblings, response)
    rank = TrainerRank(shape, ShardLayout(2), largest, 2, memory=MEMORY, deterministic=deterministic)
    [moment] = [moment for moment in rank.all() if moment.name == "actor: attention backward"]
    assert moment.parts[parts.WORKSPACE] == sum(tensor.nbytes for tensor in made)
    capped = replace(rank, shape=GEMMA2)
    assert all(parts.WORKSPACE not in moment.parts for moment in capped.all())
    # Where it is what counts, the plan is more than what is counted without kernels.
    assert fullest(rank, kernels=True) >= fullest(rank)
