"""The example jobs for GPUs, and the measurement of one on a pretended GPU beside the plan of its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT
from benchmarks.memory.pretend_gpu import Counted, PretendGpu, batch_of
from rljob_api import load_jobs, resolve
from rljob_api.memory import ModelShape, known_shape
from rljob_api.memory.inputs import MemoryInputs
from rljob_api.memory.trainer import TrainerRank
from rljob_api.resolved import ResolvedJob
from rljob_trainer.learner.settings import LearnerSettings

EXAMPLES = ROOT / "examples"
DAPO = "fully-async-dapo-7b"


@dataclass(frozen=True, slots=True)
class Example:
    """Files of ``examples/`` laid over each other, and settings."""

    files: Sequence[str]
    settings: Mapping[str, str] = field(default_factory=dict)

    def resolved(self, *, offload: bool | None = None) -> ResolvedJob:
        """``offload``: in place of what the files say of it."""
        first, *overlays = (EXAMPLES / file for file in self.files)
        settings = [f"{path}={value}" for path, value in self.settings.items()]
        if offload is not None:
            settings.append(f"trainer.offload={str(offload).lower()}")
        [job] = load_jobs(first, settings, overlays)
        return resolve(job)


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
    "retool": Example(["retool/retool-7b.yaml"]),
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


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The ``config.json`` of a model of this shape, whose layers see all, or as its family does it."""
    caps = {"attn_logit_softcapping": shape.caps_scores, "final_logit_softcapping": shape.caps_logits}
    gemma = {name: 30.0 if capped else None for name, capped in caps.items()} if shape.sandwiched else {}
    experts = {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_width,
        "decoder_sparse_step": 1,
    }
    return {
        **gemma,
        **(experts if shape.experts else {}),
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
    """Of an update, by the plan: nothing is scored on the pretended GPU."""
    return max(moment.total for moment in rank.all() if not moment.name.startswith("score"))


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
