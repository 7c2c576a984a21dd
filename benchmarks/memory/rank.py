"""What a rank of a job holds on its GPU at the peak of an update, part by part.

Masters, gradients and moments are float32 and sharded; the reference is bfloat16 and sharded. FSDP2 gathers in
bfloat16: what is in no layer (embedding, output matrix, last norm) for the whole pass with its gradient; of the layers
two at a time, the buffer in which the next one arrives, one's gradient, and two float32 buffers in which gradients of
ranks are added up, because the one before is let go of when the next one is on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.memory.activations import Model, peak_bytes

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedSpec

GIGABYTE = 10**9


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of one rank. What rests in host memory with ``offload`` is not counted."""

    state: int
    """Masters, gradients and moments."""
    reference: int
    gathered: int
    """Whole weights and gradients of what is computed with."""
    activations: int
    """And logits, by the learner's own code."""

    @property
    def total(self) -> int:
        return self.state + self.reference + self.gathered + self.activations


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parameters of a model: all, those in no layer, those of a layer."""

    all: int
    outside: int
    layer: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Sizes:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        layers = [sum(p.numel() for p in layer.parameters()) for layer in model.base_model.layers]
        every = sum(p.numel() for p in model.parameters())
        return cls(every, every - sum(layers), max(layers))


def peak_of(spec: ResolvedSpec, config: PretrainedConfig, *, offload: bool, memory: int) -> Peak:
    """Of a rank of the job with a model of this ``config``, on GPUs of ``memory`` bytes. ``offload``: whatever the job
    says of it."""
    ways = spec.trainer.parallelism
    sizes, shards = Sizes.of(config), ways.shard * ways.context
    models: list[Model] = ["actor", *(["critic"] if spec.algorithm.critic is not None else [])]  # type: ignore[list-item]
    activations = max(
        peak_bytes(
            config,
            model,
            prompt=spec.data.max_prompt_tokens,
            response=spec.rollout.max_response_tokens,
            budget=spec.trainer.micro_batch_tokens,
            memory=memory,
            checkpointing=spec.trainer.activation_checkpointing,
            chunk=spec.trainer.log_prob_chunk_tokens,
            context=ways.context,
        )
        for model in models
    )
    reference = 2 * sizes.all // shards if spec.algorithm.needs_reference and not offload else 0
    # Masters and moments of the model that waits are there too, its gradients are not.
    waiting = 0 if offload else 12 * (len(models) - 1)
    return Peak(
        state=(16 + waiting) * sizes.all // shards,
        reference=reference,
        gathered=(2 + 2) * sizes.outside + (2 * 2 + 2 + 2 + 2 * 4) * sizes.layer,
        activations=activations,
    )
