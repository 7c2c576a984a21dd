"""What a learner is told: model, precision, optimizers, memory. Taken from a resolved job; the loss comes per call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from rljob_trainer.models.fixed import FixedModel

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedJob
    from rljob_api.spec.lora import Lora
    from rljob_api.spec.pools import OptimizerSpec

Schedule = Literal["constant", "cosine", "linear"]
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """An optimizer and its schedule, which counts updates (policy versions). ``gradient_clip`` 0 turns clipping off."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon: for the matrices of the layers, and AdamW for all else."""
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    min_learning_rate_ratio: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    gradient_clip: float = 1.0

    @classmethod
    def from_spec(cls, spec: OptimizerSpec) -> OptimizerSettings:
        return cls(
            kind=spec.type,
            learning_rate=spec.learning_rate,
            warmup_steps=spec.warmup_steps,
            schedule=spec.schedule,
            min_learning_rate_ratio=spec.min_learning_rate_ratio,
            weight_decay=spec.weight_decay,
            betas=(spec.betas[0], spec.betas[1]),
            epsilon=spec.epsilon,
            gradient_clip=spec.gradient_clip,
        )


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Adapters beside linear layers: W + ``alpha`` / ``rank`` x B A (``lora.py``)."""

    rank: int
    alpha: int
    targets: tuple[str, ...] = ()
    """Names of linear layers, or how they end after a point; empty: all inside of the model's layers."""
    publish: Literal["merged", "adapter"] = "merged"
    """Whether engines are given a whole model or the adapter alone."""

    @classmethod
    def from_spec(cls, spec: Lora) -> LoraSettings:
        return cls(spec.rank, spec.alpha, tuple(spec.targets), spec.publish)


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """One learner, whatever its backend."""

    model_path: Path
    backend: str = "fsdp2"
    """``trainer.backend``: see ``learner/backends``."""
    code_paths: tuple[str, ...] = ()
    """Folders in which the module of a backend ``module:Class`` is looked for."""
    dtype: Dtype = "float32"
    """What forward and backward compute in. What is trained, and its optimizer's state, is always float32."""
    device: Literal["cpu", "cuda"] = "cpu"
    ranks: int = 1
    replicate: int = 1
    """Copies of the weights, each cut into shards over the other ranks."""
    context: int = 1
    """Groups of tensor ranks that compute each row together (``context.py``)."""
    tensor: int = 1
    """Neighbouring ranks that compute each layer together (``tensor.py``)."""
    actor: OptimizerSettings = OptimizerSettings()
    critic: OptimizerSettings | None = None
    """None: no critic."""
    critic_model: FixedModel | None = None
    """What the critic starts from; None: the policy's folder, with a head of zeros."""
    reference: bool = False
    """Whether a frozen copy of the initial model is kept; with ``lora`` it is the model without its adapter."""
    lora: LoraSettings | None = None
    """Adapters of actor and critic, which are trained instead of their weights; None: there are none."""
    micro_batch_tokens: int = 16384
    activation_checkpointing: bool = False
    compile: bool = False
    """Whether layers (``compiled.py``) and log-probs (``compiled_head.py``) go through ``torch.compile``."""
    offload: bool = False
    """Whether optimizer state, critic and reference rest in host memory while they have nothing to do (GPU)."""
    log_prob_chunk_tokens: int | None = None
    lanes: Literal[1, 2] = 2
    """Threads that one rank on a CPU may spread an update over (``cpu/lanes.py``)."""
    share_prefixes: bool = True
    """Compute what sequences of a micro-batch begin with once for all of them. Changes speed, never the result."""
    total_updates: int | None = None
    """Length of the cosine and linear schedules, in updates."""
    critic_warmup_updates: int = 0
    """The first of them, which are the critic's alone: the actor's schedule begins after them, and ends with the
    critic's."""
    seed: int = 0
    deterministic: bool = False
    """Whether only kernels may run that give the same bits each time. On a CPU they all do."""
    trust_remote_code: bool = False
    model_address: str | None = None
    """Where a node that has no ``model_path`` takes it from."""

    def __post_init__(self) -> None:
        if self.ranks % (self.replicate * self.context * self.tensor):
            raise ValueError(
                f"trainer.parallelism: replicate x context x tensor = {self.replicate} x {self.context} x "
                f"{self.tensor} does not divide the number of ranks, {self.ranks}"
            )

    @classmethod
    def from_job(
        cls,
        job: ResolvedJob,
        model_path: Path,
        total_updates: int | None = None,
        *,
        lanes: Literal[1, 2] = 2,
        model_address: str | None = None,
        code_paths: Sequence[str] = (),
        critic_model: FixedModel | None = None,
    ) -> LearnerSettings:
        """``model_path`` is the local Hugging Face folder of the job's model; where it is missing on a node it is taken
        from ``model_address``. ``code_paths``: folders with the user's modules. ``critic_model``: the job's
        ``algorithm.critic.model``.

        ``total_updates`` is for jobs that end by something else than ``stop.steps``.
        """
        spec = job.spec
        trainer, algorithm = spec.trainer, spec.algorithm
        device: Literal["cpu", "cuda"] = "cuda" if trainer.gpus_per_replica else "cpu"
        dtype = spec.model.dtype
        critic = algorithm.critic
        return cls(
            model_path=Path(model_path),
            backend=trainer.backend,
            code_paths=tuple(code_paths),
            dtype=("bfloat16" if device == "cuda" else "float32") if dtype == "auto" else dtype,
            device=device,
            ranks=trainer.ranks,
            replicate=trainer.parallelism.replicate,
            context=trainer.parallelism.context,
            tensor=trainer.parallelism.tensor,
            actor=OptimizerSettings.from_spec(trainer.optimizer),
            critic=None if critic is None else OptimizerSettings.from_spec(trainer.critic_optimizer(critic)),
            critic_model=critic_model,
            reference=algorithm.needs_reference,
            lora=None if spec.model.lora is None else LoraSettings.from_spec(spec.model.lora),
            micro_batch_tokens=trainer.micro_batch_tokens,
            activation_checkpointing=trainer.activation_checkpointing,
            compile=trainer.compile,
            offload=trainer.offload,
            log_prob_chunk_tokens=trainer.log_prob_chunk_tokens,
            lanes=lanes,
            total_updates=spec.stop.steps or total_updates,
            critic_warmup_updates=0 if critic is None else critic.warmup_steps,
            seed=spec.seed,
            deterministic=spec.deterministic,
            trust_remote_code=spec.model.trust_remote_code,
            model_address=model_address,
        )

    @property
    def compute_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.dtype]

    @property
    def actor_updates(self) -> int | None:
        """Length of the actor's schedule."""
        return None if self.total_updates is None else max(1, self.total_updates - self.critic_warmup_updates)
