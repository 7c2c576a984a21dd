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
    """How one engine is spread over GPUs."""

    tensor: int = Field(default=1, ge=1, le=1024, description="Tensor parallel size of one engine.")


class RolloutSpec(SpecModel):
    """The pool of engines that sample responses."""

    engine: Engine = Field(
        default="vllm",
        description="vllm: for real models. torch: a small batched generator for small models and CPUs.",
    )
    replicas: Annotated[int | None, LIVE, Fallback(1)] = Field(
        default=None,
        ge=1,
        le=4096,
        description="Number of engines (placement separate; colocated takes the trainer's devices).",
    )
    min_replicas: Annotated[int | None, LIVE] = Field(
        default=None, ge=1, le=4096, description="Training goes on while this many engines serve. Default: replicas."
    )
    max_replicas: Annotated[int | None, LIVE] = Field(
        default=None, ge=1, le=4096, description="Upper end for scaling. Default: replicas."
    )
    gpus_per_replica: Annotated[int, SUSPENDED] = Field(
        default=0, ge=0, le=64, description="GPUs of one engine, all in one pod. 0: on the CPU."
    )
    parallelism: Annotated[RolloutParallelism, SUSPENDED] = Field(
        default=RolloutParallelism(), description="How one engine is spread over GPUs."
    )
    max_response_tokens: int = Field(default=512, ge=1, le=16777216, description="Longest response, tokens.")
    sampling: SamplingSpec = Field(default=SamplingSpec(), description="How tokens are drawn in training.")
    environment: EnvironmentSpec = Field(
        default=EnvironmentSpec(), description="What happens between a prompt and the end of its response."
    )
    max_concurrent: Annotated[int | None, SUSPENDED] = Field(
        default=None, ge=1, le=100000, description="Requests that run at once in one engine. Default: the engine's own."
    )
    free_cache_engine: Annotated[bool, SUSPENDED] = Field(
        default=True, description="colocated: free the engine's KV cache and weights while the trainer works."
    )
    multiprocessing: Annotated[bool, SUSPENDED] = Field(
        default=False,
        description="vllm: its core runs in a process of its own, beside the one that takes requests and results.",
    )
    engine_args: Annotated[FreeForm, SUSPENDED] = Field(
        default={}, description="Passed to vLLM's EngineArgs as they are (its own snake_case names)."
    )
    env: Annotated[EnvMap, SUSPENDED] = Field(default={}, description="Environment variables of the engines.")
    pod: Annotated[Pod, SUSPENDED] = Field(default=Pod(), description="How the pods look.")


class TrainerParallelism(SpecModel):
    """How the ranks share the work: replicate x shard x context x tensor ranks. As many as context x tensor train on
    the same sequences, others on others."""

    shard: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Groups of context x tensor ranks over which a copy of the weights is cut. Default: what remains.",
    )
    replicate: int = Field(default=1, ge=1, le=65536, description="Copies of the weights (hybrid sharding).")
    context: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Ranks (groups of tensor ranks) that compute each row together, for long ones (Ulysses). Divides "
        "the heads.",
    )
    tensor: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Neighbouring ranks that compute each layer together, with a part of every matrix. Divides the "
        "heads and the key heads.",
    )


class OptimizerSpec(SpecModel):
    """An optimizer and its schedule. A step is one version of the policy, as everywhere."""

    type: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: for the layers' matrices, AdamW for the rest (arXiv:2502.16982)."
    )
    learning_rate: float = Field(default=1e-6, gt=0, le=1, description="Peak learning rate.")
    warmup_steps: int = Field(
        default=0, ge=0, le=10000000, description="Steps over which the rate grows linearly to its peak."
    )
    schedule: Schedule = Field(
        default="constant",
        description="After the warm-up. cosine, linear: falls to minLearningRateRatio at the end of training.",
    )
    min_learning_rate_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Last rate as a share of the peak (cosine, linear)."
    )
    weight_decay: float = Field(default=0.01, ge=0, le=1, description="Decoupled weight decay.")
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], ...], Field(min_length=2, max_length=2, strict=False)
    ] = Field(default=(0.9, 0.999), description="AdamW: decay rates of both moments.")
    epsilon: float = Field(default=1e-8, gt=0, le=1, description="Added to the divisor.")
    gradient_clip: float = Field(
        default=1.0, ge=0, le=1000000, description="Largest norm of the gradient. 0 turns it off."
    )


class TrainerSpec(SpecModel):
    """The pool of ranks that train."""

    backend: BackendName = Field(
        default="fsdp2",
        description="What trains: fsdp2 (PyTorch's fully sharded data parallelism), or a class as module:Class.",
    )
    replicas: Annotated[int, SUSPENDED] = Field(
        default=1, ge=1, le=4096, description="Number of pods; each has one rank a GPU (one rank without GPU)."
    )
    gpus_per_replica: Annotated[int, SUSPENDED] = Field(
        default=0, ge=0, le=64, description="GPUs of one replica. 0: on the CPU."
    )
    parallelism: Annotated[TrainerParallelism, SUSPENDED] = Field(
        default=TrainerParallelism(), description="How the ranks share the work."
    )
    optimizer: OptimizerSpec = Field(default=OptimizerSpec(), description="Optimizer and schedule.")
    micro_batch_tokens: Annotated[int, SUSPENDED] = Field(
        default=16384,
        ge=1,
        le=16777216,
        description="Tokens in one forward and backward pass of a rank. Changes memory and speed, never the result.",
    )
    activation_checkpointing: Annotated[bool, SUSPENDED] = Field(
        default=False, description="Compute activations again in the backward pass: less memory, a third more work."
    )
    compile: Annotated[bool, SUSPENDED] = Field(
        default=False,
        description="Layers and log-probs through torch.compile: fewer passes over memory, a minute or two to compile.",
    )
    offload: Annotated[bool, SUSPENDED] = Field(
        default=False, description="Keep optimizer state and idle models in host memory."
    )
    log_prob_chunk_tokens: Annotated[int | None, SUSPENDED] = Field(
        default=None,
        ge=1,
        le=16777216,
        description="Tokens whose logits exist at once. Default: for the cache (CPU); 1 GiB at most, a 64th of a GPU.",
    )
    env: Annotated[EnvMap, SUSPENDED] = Field(default={}, description="Environment variables of the ranks.")
    pod: Annotated[Pod, SUSPENDED] = Field(default=Pod(), description="How the pods look.")


class RewardModelPool(SpecModel):
    """The pool that computes the reward models of reward.functions: each replica has all of them."""

    replicas: Annotated[int, LIVE] = Field(
        default=1, ge=1, le=4096, description="Number of replicas; training goes on while one is there."
    )
    gpus_per_replica: Annotated[int, SUSPENDED] = Field(
        default=0, ge=0, le=1, description="GPUs of one replica. 0: on the CPUs of its pod, one thread for each."
    )
    env: Annotated[EnvMap, SUSPENDED] = Field(default={}, description="Environment variables of the replicas.")
    pod: Annotated[Pod, SUSPENDED] = Field(default=Pod(), description="How the pods look.")


class JudgeModel(SpecModel):
    """The language model that judges. Its weights never change."""

    source: Location = Field(description="Path, hub id or pvc://claim/path.")
    revision: ShortText | None = Field(default=None, description="Branch, tag or commit of a hub id.")
    dtype: Dtype = Field(default="auto", description="Of the weights. auto: bfloat16 on GPU, float32 on CPU.")
    chat_template: LongText | None = Field(
        default=None, description="Jinja chat template that replaces the tokenizer's own."
    )


class JudgePool(SpecModel):
    """The pool of engines that serves the judges of reward.functions without a baseUrl."""

    model: Annotated[JudgeModel, NEVER] = Field(description="Which model judges.")
    engine: Engine = Field(default="vllm", description="vllm, or torch for small models and CPUs.")
    replicas: Annotated[int, LIVE] = Field(
        default=1, ge=1, le=4096, description="Number of engines; training goes on while one is there."
    )
    gpus_per_replica: Annotated[int, SUSPENDED] = Field(
        default=0, ge=0, le=64, description="GPUs of one engine, all in one pod. 0: on the CPU."
    )
    parallelism: Annotated[RolloutParallelism, SUSPENDED] = Field(
        default=RolloutParallelism(), description="How one engine is spread over GPUs."
    )
    max_concurrent: Annotated[int | None, SUSPENDED] = Field(
        default=None, ge=1, le=100000, description="Questions at once in one engine. Default: the engine's own."
    )
    max_context_tokens: Annotated[int | None, SUSPENDED] = Field(
        default=None,
        ge=1,
        le=16777216,
        description="Longest question and answer together, in its tokens. Default: the model's context.",
    )
    engine_args: Annotated[FreeForm, SUSPENDED] = Field(
        default={}, description="Passed to vLLM's EngineArgs as they are (its own snake_case names)."
    )
    env: Annotated[EnvMap, SUSPENDED] = Field(default={}, description="Environment variables of the engines.")
    pod: Annotated[Pod, SUSPENDED] = Field(default=Pod(), description="How the pods look.")


class WeightsSpec(SpecModel):
    """How weights go from trainer to engines."""

    bucket_megabytes: int = Field(
        default=256, ge=1, le=65536, description="Size of one bucket (MiB); two exist in each process at a time."
    )
    canaries: int = Field(
        default=4, ge=0, le=64, description="Sequences scored by trainer and engines after a publication. 0: none."
    )
    canary_tolerance: float = Field(
        default=0.1, gt=0, le=100, description="Mean |log-prob difference| beyond which an engine is reloaded."
    )
