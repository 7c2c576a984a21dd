"""The memory that a plan foretells is what torch counts of the real rank on a GPU that is not there.

Fake tensors have no numbers, so models of 7B with rows of 30,000 tokens run in seconds. What is counted are storages,
by torch's own tracker; no number here comes from the plan's formulas.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pretend_gpu import PretendGpu, batch_of

from rljob_api import load_jobs, resolve
from rljob_api.memory import ModelShape, known_shape
from rljob_api.memory.activations import gpu_chunk
from rljob_api.memory.inputs import MemoryInputs
from rljob_api.memory.rows import LargestRow
from rljob_api.memory.trainer import ShardLayout, TrainerRank
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings

EXAMPLES = Path(__file__).parents[3] / "examples"
MEMORY = 80 << 30
LAYERS = 3
"""Of each model: the last, which computes less, the first, behind which none is gathered, and one between."""
DAPO = "fully-async-dapo-7b"


def config_of(shape: ModelShape) -> dict[str, Any]:
    return {
        "model_type": shape.family,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
    }


def fullest(rank: TrainerRank) -> int:
    """Of an update: nothing is scored on the pretended GPU."""
    return max(moment.total for moment in rank.all() if not moment.name.startswith("score"))


# Others are like one of these in all that a rank's memory depends on.
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
    (job,) = load_jobs(EXAMPLES / files[0], [], [EXAMPLES / file for file in files[1:]])
    resolved = resolve(job)
    shape = known_shape(resolved.spec.model.source or "")
    assert shape is not None
    inputs = MemoryInputs.of(resolved, replace(shape, layers=LAYERS), MEMORY)
    rank, row = inputs.rank(), inputs.row
    settings = LearnerSettings.from_job(resolved, Path("nowhere"))
    settings = replace(settings, log_prob_chunk_tokens=rank.head_chunk)
    batch = batch_of(row.groups, row.prompt, row.samples // row.groups, row.response)
    same = replace(row, samples=row.samples // row.groups * row.groups)
    counted = PretendGpu(monkeypatch).peak(config_of(rank.shape), settings, batch, passes=2 if rank.accumulates else 1)
    assert fullest(replace(rank, row=same)) == pytest.approx(counted, rel=0.03)


SMALL = ModelShape("qwen3", 1024, LAYERS, 16, 8, 128, 3072, 30000, tied=True)
WIDE = ModelShape("llama", 2048, LAYERS, 32, 8, 64, 8192, 16000, tied=False)
NARROW = replace(SMALL, vocabulary=1000)


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
    counted = PretendGpu(monkeypatch).peak(config_of(shape), settings, batch)
    assert fullest(rank) == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize(("shape", "ranks"), [(SMALL, 2), (WIDE, 1), (NARROW, 4)])
def test_of_scoring(shape: ModelShape, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = LargestRow(2, 512, 16, 1024)
    rank = TrainerRank(shape, ShardLayout(ranks), row, 2, memory=MEMORY)
    chunk = gpu_chunk(shape.vocabulary, MEMORY)
    settings = LearnerSettings(Path("nowhere"), dtype="bfloat16", ranks=ranks, log_prob_chunk_tokens=chunk)
    counted = PretendGpu(monkeypatch).scoring_peak(config_of(shape), settings, batch_of(2, 512, 8, 1024))
    foretold = max(moment.total for moment in rank.all() if moment.name.startswith("score"))
    assert foretold == pytest.approx(counted, rel=0.03)
