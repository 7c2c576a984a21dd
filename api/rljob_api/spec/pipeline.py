"""spec.batch, spec.pipeline and spec.stop: how much is sampled, how it becomes updates, what overlaps, when it ends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import LIVE, Fallback, SpecModel

PipelineMode = Literal["sync", "oneStepOff", "fullyAsync"]
PartialRollout = Literal["none", "keepCache", "recompute"]
OnDeadline = Literal["wait", "end", "drop"]
OLDEST_AGE = 64
"""The largest ``staleness.maxAge``."""
DEFAULT_GROUPS = 128
DEFAULT_ASYNC_MINI_BATCH_GROUPS = 32
SyncEvery = Annotated[int, Field(ge=1, le=1024)]


class Batch(SpecModel):
    """Samples per step, and how they are split into updates."""

    groups: int | None = Field(
        default=None,
        ge=1,
        le=1000000,
        description=f"Prompts per step. Default: {DEFAULT_GROUPS}; in mode fullyAsync syncEvery x requireBatches x "
        "miniBatchGroups.",
    )
    samples_per_prompt: int | None = Field(
        default=None, ge=1, le=4096, description="Responses per prompt (n). Default: the preset's."
    )
    mini_batch_groups: int | None = Field(
        default=None,
        ge=1,
        le=1000000,
        description="Prompts per optimizer step; must divide groups. Default: groups, i.e. one optimizer step; "
        f"{DEFAULT_ASYNC_MINI_BATCH_GROUPS} in mode fullyAsync.",
    )
    epochs: int = Field(default=1, ge=1, le=100, description="Passes over each batch.")
    shuffle: bool = Field(
        default=False, description="New order of groups in each epoch over the batch. false: as they came."
    )


class Staleness(SpecModel):
    """How stale samples may be when trained on."""

    max_age: Annotated[int | None, Fallback(1)] = Field(
        default=None,
        ge=0,
        le=OLDEST_AGE,
        description="Maximum age: trainer version minus the oldest version among a group's tokens. Holds for any "
        "timing.",
    )
    fraction: float | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Budget of samples ahead: open + trained <= (1 + fraction) x groups per version. Default: none.",
    )
    on_deadline: Annotated[OnDeadline | None, Fallback("wait")] = Field(
        default=None,
        description="What to do with an unfinished group that would exceed maxAge if not trained now. wait: training "
        "waits for it. end: truncate its episodes and train on them. drop: do not train on it, which "
        "under-represents long episodes.",
    )


class PipelineSpec(SpecModel):
    """What overlaps."""

    mode: PipelineMode = Field(
        default="sync",
        description="sync: sample, then train. oneStepOff: sample the next batch while one trains. fullyAsync: "
        "sampling never stops; samples are trained on as they come, within the staleness limits.",
    )
    sync_every: Annotated[SyncEvery | None, LIVE, Fallback(1)] = Field(
        default=None, description="fullyAsync: trainer pulls between two weight publications."
    )
    require_batches: Annotated[int | None, Fallback(1)] = Field(
        default=None, ge=1, le=1024, description="fullyAsync: mini-batches the trainer waits for per pull."
    )
    staleness: Annotated[Staleness, LIVE] = Field(
        default=Staleness(), description="fullyAsync: how stale samples may be."
    )
    partial_rollout: Annotated[PartialRollout | None, Fallback("none")] = Field(
        default=None,
        description="fullyAsync: how a publication treats running requests. none: wait for them. keepCache: they "
        "continue under the new weights with the old KV cache. recompute: the same with a recomputed cache.",
    )


class LiveSettings(Staleness):
    """All of spec.pipeline that may change while a job runs, as the operator sends it to the driver."""

    sync_every: Annotated[SyncEvery | None, Fallback(1)] = Field(default=None, description="pipeline.syncEvery.")


class Stop(SpecModel):
    """When to stop training: at whichever comes first. A step is one version of the policy."""

    steps: int | None = Field(default=None, ge=1, le=100000000, description="After this many steps.")
    epochs: int | None = Field(default=None, ge=1, le=1000000, description="After this many passes over the data.")
    samples: int | None = Field(default=None, ge=1, le=1000000000000, description="After this many trained samples.")
    reward: float | None = Field(
        default=None,
        ge=-1000000,
        le=1000000,
        description="When validation/mean (the share of correct answers where the reward says what is correct, else "
        "the mean score) reaches this; without validation, when the mean training reward of a step does.",
    )
    seconds: int | None = Field(default=None, ge=1, le=315360000, description="After this much training time.")
