"""Rules about spec.model.lora."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.rules.cel import MODEL, SPEC, Cel
from rljob_api.rules.registry import Job, rule
from rljob_api.violations import Violation

WITH_LORA = "fsdp2"
"""The backend that trains adapters. Another one might train the whole model as if nothing had been said."""

LARGEST_PUBLISHED = 512
"""Rank of an adapter that vLLM has kernels for."""


@rule(
    cel=Cel(
        SPEC,
        f"!has(self.model.lora) || self.trainer.backend == '{WITH_LORA}'",
        f"only trainer.backend: {WITH_LORA} trains adapters; use that, or remove lora",
        ".model.lora",
    )
)
def lora_is_trained_by_fsdp2(job: Job) -> Iterator[Violation]:
    backend = job.spec.trainer.backend
    if job.spec.model.lora is not None and backend != WITH_LORA:
        yield Violation(
            "spec.model.lora",
            f"is not supported by trainer.backend: {backend}",
            f"use trainer.backend: {WITH_LORA}, or remove lora",
        )


@rule(
    cel=Cel(
        SPEC,
        "!has(self.model.lora) || self.trainer.parallelism.tensor == 1",
        "adapters do not support tensor parallelism; use trainer.parallelism.tensor: 1, or remove lora",
        ".model.lora",
    )
)
def adapters_are_not_divided(job: Job) -> Iterator[Violation]:
    """What an adapter adds is small: peft gives each rank one of its own beside its part of a matrix, and they would
    learn apart."""
    tensor = job.spec.trainer.parallelism.tensor
    if job.spec.model.lora is not None and tensor > 1:
        yield Violation(
            "spec.model.lora",
            f"adapters do not support tensor parallelism in the trainer (parallelism.tensor = {tensor})",
            "use trainer.parallelism.tensor: 1 (shard and context work with adapters), or remove lora",
        )


@rule(
    cel=Cel(
        (*MODEL, "lora"),
        "!has(self.targets) || self.targets.all(t, self.targets.exists_one(u, u == t))",
        "lists a layer twice; list each once",
        ".targets",
    )
)
def lora_targets_differ(job: Job) -> Iterator[Violation]:
    lora = job.spec.model.lora
    targets = lora.targets if lora else ()
    if twice := sorted({name for name in targets if targets.count(name) > 1}):
        yield Violation("spec.model.lora.targets", f"lists {', '.join(twice)} more than once", "list each once")


_ALONE = "!has(self.model.lora) || self.model.lora.publish != 'adapter'"


@rule(
    cel=[
        Cel(
            SPEC,
            f"{_ALONE} || (self.rollout.engine == 'vllm' && self.rollout.parallelism.tensor == 1)",
            "adapter needs vLLM engines with rollout.parallelism.tensor: 1; use those, or publish: merged",
            ".model.lora.publish",
        ),
        Cel(
            SPEC,
            f"{_ALONE} || self.model.lora.rank <= {LARGEST_PUBLISHED}",
            f"is more than the {LARGEST_PUBLISHED} that vLLM supports; lower it, or use publish: merged",
            ".model.lora.rank",
        ),
    ]
)
def adapters_are_published_to_vllm(job: Job) -> Iterator[Violation]:
    lora, rollout = job.spec.model.lora, job.spec.rollout
    if lora is None or lora.publish != "adapter":
        return
    path, remedy = "spec.model.lora.publish", "or use publish: merged"
    if rollout.engine != "vllm":
        yield Violation(
            path, f"adapter is not supported by the {rollout.engine} engine", f"use rollout.engine: vllm, {remedy}"
        )
    elif rollout.parallelism.tensor > 1:
        yield Violation(
            path,
            "adapter is not supported with engines of several GPUs (rollout.parallelism.tensor = "
            f"{rollout.parallelism.tensor})",
            f"use 1, {remedy}",
        )
    if lora.rank > LARGEST_PUBLISHED:
        yield Violation(
            "spec.model.lora.rank",
            f"{lora.rank} is more than the {LARGEST_PUBLISHED} that vLLM supports",
            f"lower it, {remedy}",
        )
