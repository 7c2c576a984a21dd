"""spec.batch, spec.pipeline and spec.stop: how much is sampled, how it becomes updates, what overlaps, when it ends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import LIVE, SpecModel

PipelineMode = Literal["sync", "oneStepOff", "fullyAsync"]
PartialRollout = Literal["none", "keepCache", "recompute"]


class Batch(SpecModel):
    """How many samples a step has and how they are cut into updates."""

    groups: int | None = Field(
        default=None,
        ge=1,
        le=1000000,
        description="Prompts per step. Default: 128; in mode fullyAsync syncEvery x requireBatches x miniBatchGroups.",
    )
    samples_per_prompt: int | None = Field(
        default=None, ge=1, le=4096, description="Responses per prompt (n). Default: the preset's."
    )
    mini_batch_groups: int | None = Field(
        default=None,
        ge=1,
        le=1000000,
        description="Prompts per optimizer step; must divide groups. Default: groups, that is one optimizer step; "
        "in mode fullyAsync 32.",
    )
    epochs: int = Field(default=1, ge=1, le=100, description="Passes over each batch.")
    shuffle: bool = Field(
        default=False, description="New order of groups in each epoch over the batch; false: as they came."
    )


class Staleness(SpecModel):
    """How old samples may be when they are trained on."""

    max_age: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Bound on the age: trainer's version minus the oldest version among a group's tokens. "
        "Kept whatever the timing. Default: 1.",
    )
    fraction: float | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Budget of samples ahead: open + trained <= (1 + fraction) x groups per version. Default: none.",
    )


class Pipeline(SpecModel):
    """What overlaps."""

    mode: PipelineMode = Field(
        default="sync",
        description="sync: sample, then train. oneStepOff: the next batch is sampled while one trains. "
        "fullyAsync: sampling never stops; samples are trained as they come, within the bounds of staleness.",
    )
    sync_every: Annotated[int | None, LIVE] = Field(
        default=None,
        ge=1,
        le=1024,
        description="fullyAsync: pulls of the trainer between two publications of weights. Default: 1.",
    )
    require_batches: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="fullyAsync: mini-batches the trainer waits for in one pull. Default: 1.",
    )
    staleness: Annotated[Staleness, LIVE] = Field(
        default=Staleness(), description="fullyAsync: how old samples may be."
    )
    partial_rollout: PartialRollout | None = Field(
        default=None,
        description="fullyAsync: what a publication does to running requests. none: it waits for them. keepCache: they "
        "go on under the new weights with their old KV cache. recompute: the cache is computed again. "
        "Default: none.",
    )


class Stop(SpecModel):
    """When training ends: at whichever comes first. A step is one version of the policy."""

    steps: int | None = Field(default=None, ge=1, le=100000000, description="After this many steps.")
    epochs: int | None = Field(default=None, ge=1, le=1000000, description="After this many passes over the data.")
    samples: int | None = Field(default=None, ge=1, le=1000000000000, description="After this many trained samples.")
    reward: float | None = Field(
        default=None,
        ge=-1000000,
        le=1000000,
        description="When the mean validation score (without validation: a step's mean training reward) reaches it.",
    )
    seconds: int | None = Field(default=None, ge=1, le=315360000, description="After this much time of training.")
