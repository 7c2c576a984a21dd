"""The example jobs for GPUs, and the measurement of one on a pretended GPU beside the plan of its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.memory.examples import Example, config_of
from benchmarks.memory.pretend_gpu import Counted, PretendGpu
from benchmarks.memory.rows import batch_of
from rljob_api.memory import known_shape
from rljob_api.memory.inputs import MemoryInputs
from rljob_api.memory.trainer import TrainerRank
from rljob_api.resolved import ResolvedJob
from rljob_trainer.learner.settings import LearnerSettings

DAPO = "fully-async-dapo-7b"


PPO_7B = "gsm8k at 7B on 4 ranks"
PPO_7B_CHECKPOINTING = f"{PPO_7B}, activation checkpointing"
_AT_7B = {"model.source": "Qwen/Qwen2.5-7B-Instruct", "trainer.gpusPerReplica": "4"}
JOBS: Mapping[str, Example] = {
    "gsm8k": Example(["gsm8k.yaml"]),
    PPO_7B: Example(["gsm8k.yaml"], _AT_7B),
    PPO_7B_CHECKPOINTING: Example(["gsm8k.yaml"], _AT_7B | {"trainer.activationCheckpointing": "true"}),
    "one-step-off": Example(["one-step-off.yaml"]),
    **{
        f"{DAPO} {split}": Example([f"{DAPO}/base.yaml", f"{DAPO}/{split}.yaml"])
        for split in ("4-4", "4-12", "8-8", "16-16", "32-32", "64-64")
    },
    "code": Example(["code/deepcoder-7b.yaml"]),
    "llm-judge": Example(["llm-judge/helpful-7b.yaml"]),
    "llm-judge, its own judge": Example(["llm-judge/own-judge-7b.yaml"]),
    "reasoning-gym": Example(["reasoning-gym/grpo-1.5b.yaml"]),
    "retool": Example(["retool/retool-7b.yaml"]),
    "search": Example(["search/search-r1-3b.yaml"]),
    "reward-model": Example(["reward-model/helpful-7b.yaml"]),
    "grpo-7b-lora-one-gpu": Example(["grpo-7b-lora-one-gpu/grpo-7b-lora.yaml"]),
    "ppo-gemma": Example(["ppo-gemma/gemma-2-2b.yaml"]),
    "dapo-30b-a3b-fsdp": Example(["dapo-30b-a3b-fsdp/dapo-30b-a3b.yaml"]),
    "grpo-70b-tensor": Example(["grpo-70b-tensor/grpo-70b.yaml"]),
}
NOT_MEASURED: Mapping[str, str] = {}
"""Other examples for GPUs, by file, with the reason why not."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A rank of a job: what was counted, and what the plan says of the same row, in bytes."""

    counted: Counted
    planned: int


def measure(job: ResolvedJob, gpu: PretendGpu, memory: int, layers: int | None = None) -> tuple[Counted, TrainerRank]:
    """An update of the largest row of a rank of the job on a GPU of ``memory`` bytes, and the rank as it is planned.
    ``layers``: of the model, in place of its own."""
    shape = known_shape(job.spec.model.source or "")
    assert shape is not None
    inputs = MemoryInputs.of(job, replace(shape, layers=layers or shape.layers), memory)
    rank, row = inputs.rank(), inputs.row
    settings = replace(LearnerSettings.from_job(job, Path("nowhere")), log_prob_chunk_tokens=rank.head_chunk)
    siblings = row.samples // row.groups
    batch = batch_of(row.groups, row.prompt, siblings, row.response)
    counted = gpu.update(config_of(rank.shape), settings, batch, passes=2 if rank.accumulates else 1)
    return counted, replace(rank, row=replace(row, samples=siblings * row.groups))
