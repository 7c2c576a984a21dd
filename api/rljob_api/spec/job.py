"""The RLJob itself: kind, metadata and the spec with its sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.algorithm import Algorithm
from rljob_api.spec.base import (
    DNS_SUBDOMAIN,
    IMAGE,
    LIVE,
    SUSPENDED,
    DnsLabel,
    LabelKey,
    Listed,
    NullIsAbsent,
    QueueName,
    SpecModel,
)
from rljob_api.spec.data import Data
from rljob_api.spec.lifecycle import CheckpointSpec, Deadlines, Logging, Restore, Retry, Validation
from rljob_api.spec.model import Model
from rljob_api.spec.pipeline import Batch, PipelineSpec, Stop
from rljob_api.spec.pod import Code, HeadPod, LabelMap
from rljob_api.spec.pools import JudgePool, Placement, RewardModelPool, RolloutSpec, TrainerSpec, WeightsSpec
from rljob_api.spec.reward import Reward

API_VERSION = "rljob.dev/v1alpha1"
KIND = "RLJob"
MAX_NAME = 40
"""Longest job name: the names of child objects (RayCluster at most 53 characters) are made from it."""

_ANNOTATION_CHARACTERS = 256 << 10
"""Kubernetes allows so many bytes in all; kubectl keeps a whole manifest in one."""


class Metadata(SpecModel):
    """Name and labels, as for every Kubernetes object."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)] = Field(
        description=f"Name of the job: at most {MAX_NAME} lower-case letters, digits and '-'."
    )
    namespace: DnsLabel | None = Field(default=None, description="Namespace (cluster only).")
    labels: LabelMap = Field(default={}, description="Labels.")
    annotations: Annotated[dict[LabelKey, Annotated[str, Field(max_length=_ANNOTATION_CHARACTERS)]], NullIsAbsent] = (
        Field(default={}, max_length=1024, description="Annotations.")
    )


class Spec(SpecModel):
    """What to train, on what, how, and with which resources."""

    image: Annotated[Annotated[str, Field(min_length=1, max_length=512, pattern=IMAGE)] | None, SUSPENDED] = Field(
        default=None, description="Trainer image (cluster only). Default: the operator's trainerImage."
    )
    model: Model = Field(description="The model to train.")
    data: Data = Field(description="Training and validation prompts.")
    reward: Reward = Field(description="What a response is worth.")
    algorithm: Algorithm = Field(description="How scored samples become gradients.")
    batch: Batch = Field(default=Batch(), description="Samples per step, and how they are split into updates.")
    pipeline: PipelineSpec = Field(default=PipelineSpec(), description="What overlaps.")
    placement: Placement | None = Field(
        default=None,
        description="separate: engines and trainer have their own devices. colocated: they take turns on the "
        "trainer's. Default: colocated in mode sync without rollout.replicas, else separate.",
    )
    rollout: RolloutSpec = Field(default=RolloutSpec(), description="Pool of inference engines that sample responses.")
    trainer: TrainerSpec = Field(default=TrainerSpec(), description="Pool of trainer ranks.")
    reward_model: Annotated[RewardModelPool | None, SUSPENDED] = Field(
        default=None, description="Pool for reward models. Default: they run next to the driver."
    )
    judge: Annotated[JudgePool | None, SUSPENDED] = Field(
        default=None, description="Pool of engines for judges without a baseUrl. Default: none."
    )
    weights: WeightsSpec = Field(default=WeightsSpec(), description="How weights are synced from trainer to engines.")
    checkpoint: CheckpointSpec = Field(default=CheckpointSpec(), description="When and where to save checkpoints.")
    validation: Annotated[Validation, SUSPENDED] = Field(
        default=Validation(), description="When to score the held-out sets."
    )
    stop: Annotated[Stop | None, SUSPENDED] = Field(
        default=None, description="When to stop training. Default: after one pass over the data."
    )
    logging: Annotated[Logging, SUSPENDED] = Field(
        default=Logging(), description="What to write besides metrics.jsonl."
    )
    restore: Restore | None = Field(default=None, description="Where a new job starts. Default: the model.")
    retry: Annotated[Retry, LIVE] = Field(default=Retry(), description="How to handle failures (cluster only).")
    deadlines: Annotated[Deadlines, LIVE] = Field(default=Deadlines(), description="How long things may take.")
    suspend: Annotated[bool, LIVE] = Field(
        default=False, description="true: checkpoint, then free the pods. false again: resume (cluster only)."
    )
    ttl_seconds_after_finished: Annotated[int | None, LIVE] = Field(
        default=None, ge=0, le=315360000, description="Delete the job this long after it ends. Default: never."
    )
    queue_name: Annotated[QueueName | None, SUSPENDED] = Field(
        default=None, description="Kueue queue for the job (cluster only)."
    )
    head: Annotated[HeadPod, SUSPENDED] = Field(default=HeadPod(), description="The head pod (cluster only).")
    code: Annotated[Annotated[Listed[Code], Field(max_length=16)], SUSPENDED] = Field(
        default=(), description="Your Python files, e.g. custom rewards (cluster only)."
    )
    seed: int = Field(
        default=0, ge=0, le=2147483647, description="Seed of sampling, and of everything without its own seed."
    )
    deterministic: Annotated[bool, SUSPENDED] = Field(
        default=False,
        description="GPUs: use bitwise reproducible kernels in trainer and engines. Slower; vLLM's need compute "
        "capability 8.0 (A100). CPUs are reproducible either way.",
    )


class RLJob(SpecModel):
    """A training run: model, data, reward, algorithm, pool sizes, and how stale a sample may be."""

    api_version: Literal["rljob.dev/v1alpha1"] = Field(description="Version of this schema.")
    kind: Literal["RLJob"] = Field(description="Always RLJob.")
    metadata: Metadata = Field(description="Name and labels.")
    spec: Spec = Field(description="What to train, on what, how, and with which resources.")
