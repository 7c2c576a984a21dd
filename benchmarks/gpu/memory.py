"""A learner rank's device memory during an update, beside what `rljob plan --memory` says of the same rows.

Models have the shapes of those that the examples name, with as many layers as can be written to disk in seconds: what
the plan says of a layer is what is asked here, and what it says of what lies outside of the layers.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu.figures import Writer
from benchmarks.gpu.learner import free_port
from benchmarks.memory.examples import Example, config_of, fullest
from benchmarks.memory.rows import batch_of, in_one_row
from rljob_api.memory import known_shape
from rljob_api.memory.inputs import MemoryInputs
from rljob_api.memory.plan import CONTEXT_BYTES
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.protocol import LossSettings, UpdateRequest
from rljob_trainer.learner.settings import LearnerSettings

ONE_RANK = {"trainer.replicas": "1", "trainer.gpusPerReplica": "1"}
GIB = 2**30
BOUND = 0.05
"""Of the plan against what was allocated: the pretended GPU's bound is 0.03, and of kernels attention's is planned."""


@dataclass(frozen=True, slots=True)
class Case:
    """A job on one GPU whose model has ``layers`` layers; None: all that it has."""

    example: Example
    layers: int | None = None


_LORA = Example(["grpo-7b-lora-one-gpu/grpo-7b-lora.yaml"])
_GEMMA = Example(["ppo-gemma/gemma-2-2b.yaml"], ONE_RANK | {"rollout.parallelism.tensor": "1"})
_EXPERTS = Example(["dapo-30b-a3b-fsdp/dapo-30b-a3b.yaml"], ONE_RANK | {"trainer.parallelism": "{}"})
CASES: Mapping[str, Case] = {
    "PPO 0.5B": Case(Example(["gsm8k.yaml"], ONE_RANK)),
    "GRPO 7B": Case(replace(_LORA, settings={"model.lora": "null"}), layers=3),
    "LoRA 7B": Case(_LORA, layers=6),
    "PPO Gemma 2 2B": Case(_GEMMA, layers=4),
    "Qwen3 30B-A3B": Case(_EXPERTS, layers=2),
}


def measure(writer: Writer, cache: Path) -> None:
    before = _used()  # by others: this process has nothing there yet
    for name, case in CASES.items():
        try:
            _measure(writer, cache, name, case, before)
        except Exception as error:  # noqa: BLE001
            # One kind of model that cannot be updated says nothing of the others.
            writer.failed(f"{name}: an update", f"{type(error).__name__}: {error}"[:2000])
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            gc.collect()
            torch.cuda.empty_cache()


def _measure(writer: Writer, cache: Path, name: str, case: Case, before: int) -> None:
    """``before``: bytes of the GPU that others have."""
    card = torch.cuda.get_device_properties(0).total_memory
    job = case.example.resolved()
    shape = known_shape(job.spec.model.source or "")
    assert shape is not None
    inputs = MemoryInputs.of(job, replace(shape, layers=case.layers or shape.layers), card)
    planned, row = inputs.rank(), inputs.row
    folder = _written(cache / "memory-models" / name.replace(" ", "-"), config_of(planned.shape))
    siblings = row.samples // row.groups
    share = in_one_row(batch_of(row.groups, row.prompt, siblings, row.response))
    share.micro_batches[0] *= 2 if planned.accumulates else 1
    plan = fullest(replace(planned, row=replace(row, samples=siblings * row.groups)), kernels=True)
    rank = None
    try:
        rank = Fsdp2().start(LearnerSettings.from_job(job, folder), address=f"127.0.0.1:{free_port()}")
        rank.update(share, LossSettings(), UpdateRequest(update_critic=rank.critic is not None))
        torch.cuda.reset_peak_memory_stats()
        rank.update(share, LossSettings(), UpdateRequest(update_critic=rank.critic is not None))
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        writer.plain(f"{name}: allocated at the fullest moment", peak / GIB, "GiB")
        writer.at_most(f"{name}: plan beside it, relative difference", abs(plan / peak - 1), BOUND)
        writer.plain(f"{name}: plan", plan / GIB, "GiB")
        writer.plain(f"{name}: reserved over allocated", reserved / peak)
        own = _used() - torch.cuda.memory_reserved() - before
        writer.plain(f"{name}: the process's own", own / GIB, f"GiB (plan: {CONTEXT_BYTES / GIB:.1f})")
    finally:
        if rank is not None:
            rank.close()
        shutil.rmtree(folder)


def _used() -> int:
    """Bytes of the GPU that are taken, by whomever. Asked without CUDA, which would take its own for the question."""
    question = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(question, check=True, capture_output=True, text=True).stdout) << 20


def _written(folder: Path, config: dict[str, object]) -> Path:
    """A model of that configuration with random weights in bfloat16, drawn on the GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.rmtree(folder, ignore_errors=True)
    made = AutoConfig.for_model(str(config["model_type"]), **{k: v for k, v in config.items() if k != "model_type"})
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder
