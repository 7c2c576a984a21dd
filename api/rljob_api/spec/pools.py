"""spec.rollout, spec.trainer, spec.rewardModel, spec.judge and spec.weights: the pools and the way of the weights
between them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import (
    IN_MODULE,
    LIVE,
    NEVER,
    SUSPENDED,
    EnvMap,
    Fallback,
    FreeForm,
    Location,
    LongText,
    ShortText,
    SpecModel,
)
from rljob_api.spec.data import SamplingSpec
from rljob_api.spec.environment import EnvironmentSpec
from rljob_api.spec.model import Dtype
from rljob_api.spec.pod import Pod

Engine = Literal["vllm", "torch"]
Schedule = Literal["constant", "cosine", "linear"]
Placement = Literal["separate", "colocated"]
BackendName = Annotated[str, Field(min_length=3, max_length=253, pattern=rf"^(fsdp2|{IN_MODULE})$")]
"""A backend that is built in, or ``module:Class``."""


class RolloutParallelism(SpecModel):
    """How one engine is split over GPUs."""

    tensor: int = Field(default=1, ge=1, le=1024, description="Tensor-parallel size of one engine.")


class RolloutSpec(SpecModel):
    """Pool of inference engines that sample responses."""

    engine: Engine = Field(
        default="vllm",
        description="vllm: for real models. torch: a small batched generator for small models and CPUs.",
    )
    replicas: Annotated[int | None, LIVE, Fallback(1)] = Field(
        default=None,
        ge=1,
        le=4096,
        description="Number of engines (placement separate; colocated uses the trainer's devices).",
    )
    min_replicas: Annotated[int | None, LIVE] = Field(
        default=None, ge=1, le=4096, description="Training continues while this many engines serve. Default: replicas."
    )
    max_replicas: Annotated[int | None, LIVE] = Field(
        default=None, ge=1, le=4096, description="Upper limit for scaling. Default: replicas."
    )
    gpus_per_replica: Annotated[int, SUSPENDED] = Field(
        default=0, ge=0, le=64, description="GPUs per engine, all in one pod. 0: CPU."
    )
    parallelism: Annotated[RolloutParallelism, SUSPENDED] = Field(
        default=RolloutParallelism(), description="How one engine is split over GPUs."
    )
    max_response_tokens: int = Field(default=512, ge=1, le=16777216, description="Maximum response length, tokens.")
    sampling: SamplingSpec = Field(default=SamplingSpec(), description="How training tokens are sampled.")
    environment: EnvironmentSpec = Field(default=EnvironmentSpec(), description="How a prompt becomes an episode.")
    max_concurrent: Annotated[int | None, SUSPENDED] = Field(
        default=None, ge=1, le=100000, description="Concurrent requests per engine. Default: the engine's own."
    )
    free_cache_engine: Annotated[bool, SUSPENDED] = Field(
        default=True, description="colocated: free the engine's KV cache and weights while the trainer works."
    )
    multiprocessing: Annotated[bool, SUSPENDED] = Field(
        default=False,
        description="vllm: run its core in its own process, apart from the one that handles requests and results.",
    )
    engine_args: Annotated[FreeForm, SUSPENDED] = Field(
        default={}, description="Passed unchanged to vLLM's EngineArgs (snake_case names)."
    )
    env: Annotated[EnvMap, SUSPENDED] = Field(default={}, description="Environment variables of the engines.")
    pod: Annotated[Pod, SUSPENDED] = Field(default=Pod(), description="Settings of its pods.")


class TrainerParallelism(SpecModel):
    """How ranks share the work: replicate x shard x context x tensor ranks. Each set of context x tensor ranks trains
    on its own sequences."""

    shard: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Sets of context x tensor ranks that one copy of the weights is sharded over. Default: the "
        "remaining ones.",
    )
    replicate: int = Field(default=1, ge=1, le=65536, description="Copies of the weights (hybrid sharding).")
    context: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Ranks (or sets of tensor ranks) that share each sequence, for long ones (Ulysses). Must divide "
        "the heads.",
    )
    tensor: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Neighbouring ranks that share each layer, with a part of every matrix. Must divide the heads "
        "and key heads.",
    )


class OptimizerSpec(SpecModel):
    """Optimizer and schedule. A step is one version of the policy, as everywhere."""

    type: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: for the layers' matrices, AdamW for the rest (arXiv:2502.16982)."
    )
    learning_rate: float = Field(default=1e-6, gt=0, le=1, description="Peak learning rate.")
    warmup_steps: int = Field(default=0, ge=0, le=10000000, description="Steps of linear warm-up to the peak.")
    schedule: Schedule = Field(
        default="constant",
        description="After warm-up. cosine, linear: decay to minLearningRateRatio at the end of training.",
    )
    min_learning_rate_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Final rate as a fraction of the peak (cosine, linear)."
    )
    weight_decay: float = Field(default=0.01, ge=0, le=1, description="Decoupled weight decay.")
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], ...], Field(min_length=2, max_length=2, strict=False)
    ] = Field(default=(0.9, 0.999), description="AdamW: decay rates of the two moments.")
    epsilon: float = Field(default=1e-8, gt=0, le=1, description="Added to the divisor.")
    gradient_clip: float = Field(default=1.0, ge=0, le=1000000, description="Maximum gradient norm. 0 turns it off.")


class TrainerSpec(SpecModel):
    """Pool of trainer ranks."""

    backend: BackendName = Field(
        default="fsdp2",
        description="Training backend: fsdp2 (PyTorch fully sharded data parallel), or your class as module:Class.",
    )
    replicas: Annotated[int, SUSPENDED] = Field(
        default=1, ge=1, le=4096, description="Number of pods, each with one rank per GPU (one rank without GPUs)."
    )
    gpus_per_replica: Annotated[int, SUSPENDED] = Field(default=0, ge=0, le=64, description="GPUs per replica. 0: CPU.")
    parallelism: Annotated[TrainerParallelism, SUSPENDED] = Field(
        default=TrainerParallelism(), description="How the ranks share the work."
    )
    optimizer: OptimizerSpec = Field(default=OptimizerSpec(), description="Optimizer and schedule.")
    micro_batch_tokens: Annotated[int, SUSPENDED] = Field(
        default=16384,
        ge=1,
        le=16777216,
        description="Tokens per forward and backward pass of a rank. Affects memory and speed, never the result.",
    )
    activation_checkpointing: Annotated[bool, SUSPENDED] = Field(
        default=False, description="Recompute activations in the backward pass: less memory, a third more compute."
    )
    compile: Annotated[bool, SUSPENDED] = Field(
        default=False,
        description="Run layers and log-probs through torch.compile: fewer memory passes, a minute or two to compile.",
    )
    offload: Annotated[bool, SUSPENDED] = Field(
        default=False, description="Keep optimizer state and idle models in host memory."
    )
    log_prob_chunk_tokens: Annotated[int | None, SUSPENDED] = Field(
        default=None,
        ge=1,
        le=16777216,
        description="Tokens whose logits are in memory at once. Default: sized for the cache (CPU); at most 1 GiB or "
        "1/64 of a GPU.",
    )
    env: Annotated[EnvMap, SUSPENDED] = Field(default={}, description="Environment variables of the ranks.")
    pod: Annotated[Pod, SUSPENDED] = Field(default=Pod(), description="Settings of its pods.")


class RewardModelPool(SpecModel):
    """Pool that computes the reward models of reward.functions. Each replica has all of them."""

    replicas: Annotated[int, LIVE] = Field(
        default=1, ge=1, le=4096, description="Number of replicas. Training continues while one is up."
    )
    gpus_per_replica: Annotated[int, SUSPENDED] = Field(
        default=0, ge=0, le=1, description="GPUs per replica. 0: the pod's CPUs, one thread each."
    )
    env: Annotated[EnvMap, SUSPENDED] = Field(default={}, description="Environment variables of the replicas.")
    pod: Annotated[Pod, SUSPENDED] = Field(default=Pod(), description="Settings of its pods.")


class JudgeModel(SpecModel):
    """The language model that judges. Its weights never change."""

    source: Location = Field(description="Path, hub id or pvc://claim/path.")
    revision: ShortText | None = Field(default=None, description="Branch, tag or commit of a hub id.")
    dtype: Dtype = Field(default="auto", description="Weight dtype. auto: bfloat16 on GPU, float32 on CPU.")
    chat_template: LongText | None = Field(
        default=None, description="Jinja chat template that replaces the tokenizer's."
    )


class JudgePool(SpecModel):
    """Pool of engines for the judges in reward.functions without a baseUrl."""

    model: Annotated[JudgeModel, NEVER] = Field(description="The judge model.")
    engine: Engine = Field(default="vllm", description="vllm, or torch for small models and CPUs.")
    replicas: Annotated[int, LIVE] = Field(
        default=1, ge=1, le=4096, description="Number of engines. Training continues while one is up."
    )
    gpus_per_replica: Annotated[int, SUSPENDED] = Field(
        default=0, ge=0, le=64, description="GPUs per engine, all in one pod. 0: CPU."
    )
    parallelism: Annotated[RolloutParallelism, SUSPENDED] = Field(
        default=RolloutParallelism(), description="How one engine is split over GPUs."
    )
    max_concurrent: Annotated[int | None, SUSPENDED] = Field(
        default=None, ge=1, le=100000, description="Concurrent questions per engine. Default: the engine's own."
    )
    max_context_tokens: Annotated[int | None, SUSPENDED] = Field(
        default=None,
        ge=1,
        le=16777216,
        description="Maximum length of question plus answer, in its tokens. Default: the model's context.",
    )
    engine_args: Annotated[FreeForm, SUSPENDED] = Field(
        default={}, description="Passed unchanged to vLLM's EngineArgs (snake_case names)."
    )
    env: Annotated[EnvMap, SUSPENDED] = Field(default={}, description="Environment variables of the engines.")
    pod: Annotated[Pod, SUSPENDED] = Field(default=Pod(), description="Settings of its pods.")


class WeightsSpec(SpecModel):
    """How weights are synced from trainer to engines."""

    bucket_megabytes: int = Field(
        default=256, ge=1, le=65536, description="Bucket size (MiB). Each process holds two at a time."
    )
    canaries: int = Field(
        default=4, ge=0, le=64, description="Sequences that trainer and engines score after each publication. 0: none."
    )
    canary_tolerance: float = Field(
        default=0.1, gt=0, le=100, description="Mean |log-prob difference| above which an engine is reloaded."
    )
