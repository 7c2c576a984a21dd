"""The status of an RLJob as the operator writes it and the API server stores it: the schema of ``.status``.

Everything is optional and bounded; the operator's own types say what each part means and when it is there.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import Format, Listed, MapKeys, SpecModel

Text = Annotated[str, Field(max_length=1024)]
Name = Annotated[str, Field(max_length=253)]
Moment = Annotated[str, Field(max_length=64), Format("date-time")]
"""RFC 3339."""
Count = Annotated[int, Field(ge=0, le=1000000000000)]
Figure = Annotated[float, Field(ge=-1e18, le=1e18)]


class ConditionStatus(SpecModel):
    """One condition, as of every Kubernetes object."""

    type: Annotated[str, Field(min_length=1, max_length=316)] = Field(description="Name of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: Annotated[str, Field(min_length=1, max_length=1024)] = Field(description="Why, in one word.")
    message: Annotated[str, Field(max_length=32768)] = Field(default="", description="Why, in a sentence.")
    observed_generation: Count | None = Field(default=None, description="Generation that this was said of.")
    last_transition_time: Moment | None = Field(default=None, description="When the status last changed.")


class AttemptStatus(SpecModel):
    """One run of the driver."""

    attempt: Count = Field(description="Its number.")
    incarnation: Count | None = Field(default=None, description="Number of the cluster it ran on.")
    start_time: Moment | None = Field(default=None, description="When it was started.")
    end_time: Moment | None = Field(default=None, description="When it ended.")
    reason: Name | None = Field(default=None, description="How it ended, in one word.")
    message: Annotated[str, Field(max_length=4096)] | None = Field(default=None, description="How it ended.")
    exit_code: Annotated[int, Field(ge=-255, le=255)] | None = Field(
        default=None, description="The driver's exit code."
    )
    checkpoint_step: Count | None = Field(default=None, description="Step of the newest checkpoint when it ended.")
    counted: bool | None = Field(default=None, description="Whether it counts against spec.retry.limit.")
    disrupted: bool | None = Field(default=None, description="A pod was evicted or its node lost while it ran.")
    last_lines: Annotated[Listed[Annotated[str, Field(max_length=2048)]], Field(max_length=64)] = Field(
        default=(), description="The driver's last lines; secrets are masked."
    )


class PoolStatus(SpecModel):
    """One pool, in replicas."""

    desired: Count | None = Field(default=None, description="Replicas wanted.")
    replicas: Count | None = Field(default=None, description="Replicas that exist.")
    ready: Count | None = Field(default=None, description="Replicas that are ready.")
    summary: Annotated[str, Field(max_length=64)] | None = Field(default=None, description="Ready of wanted: `3/4`.")
    selector: Annotated[str, Field(max_length=2048)] | None = Field(
        default=None, description="Label selector of its pods."
    )


class ProgressStatus(SpecModel):
    """Where training stands, from the driver."""

    step: Count | None = Field(default=None, description="Steps done.")
    version: Count | None = Field(default=None, description="Policy version.")
    total_steps: Count | None = Field(default=None, description="Steps in all, where they can be told.")
    reward: Figure | None = Field(default=None, description="Mean score of the last step.")
    best_reward: Figure | None = Field(default=None, description="Best mean score of a step so far.")
    validation: Annotated[dict[Name, Figure], Field(max_length=64)] = Field(
        default={}, description="Last validation score by set."
    )
    step_seconds: Figure | None = Field(default=None, description="Time of a step.")
    tokens_per_second: Figure | None = Field(default=None, description="Response tokens of all engines.")
    trainer_idle: Figure | None = Field(default=None, description="Share of time that the trainer waits.")
    rollout_idle: Figure | None = Field(default=None, description="Share of time that the engines wait.")
    oldest_age: Count | None = Field(default=None, description="Largest age of the groups last trained, in versions.")
    age_bound: Count | None = Field(default=None, description="Largest age allowed: staleness.maxAge in force.")
    unsaved: Text | None = Field(
        default=None, description="Why the newest checkpoint could not be written; absent: it could."
    )
    waiting_for: Annotated[str, Field(max_length=2048)] | None = Field(
        default=None, description="What the run waits for."
    )
    eta: Moment | None = Field(default=None, description="When the run is expected to end.")
    engines_ready: Count | None = Field(default=None, description="Engines that serve or validate.")
    ranks_ready: Count | None = Field(default=None, description="Trainer ranks that answer.")


class CheckpointStatus(SpecModel):
    """The newest whole checkpoint."""

    uri: Text | None = Field(default=None, description="Where it lies.")
    step: Count | None = Field(default=None, description="The step it was made after.")
    time: Moment | None = Field(default=None, description="When.")


class RLJobStatus(SpecModel):
    """What the operator has seen and done. Written by the operator only."""

    observed_generation: Count | None = Field(default=None, description="Generation that the status is about.")
    algorithm: Name | None = Field(default=None, description="Preset of the job.")
    incarnation: Count | None = Field(default=None, description="Number of the present or next cluster.")
    attempt: Count | None = Field(default=None, description="Highest attempt ever begun.")
    failures: Count | None = Field(default=None, description="Counted failures since the last checkpoint.")
    attempts: Annotated[Listed[AttemptStatus], Field(max_length=64), MapKeys(("attempt",))] = Field(
        default=(), description="The newest attempts."
    )
    pools: Annotated[dict[Name, PoolStatus], Field(max_length=16)] = Field(default={}, description="Pools by name.")
    progress: ProgressStatus | None = Field(default=None, description="Where training stands.")
    checkpoint: CheckpointStatus | None = Field(default=None, description="The newest whole checkpoint.")
    start_time: Moment | None = Field(default=None, description="When the job was first admitted.")
    end_time: Moment | None = Field(default=None, description="When the job ended.")
    pause_time: Moment | None = Field(default=None, description="Since when it is suspended, or has lost its quota.")
    paused_seconds: Count | None = Field(default=None, description="How long it was so before.")
    suspend_time: Moment | None = Field(default=None, description="Since when the job is wanted suspended.")
    resize_time: Moment | None = Field(default=None, description="Since when the rollout pool is being made smaller.")
    conditions: Annotated[Listed[ConditionStatus], Field(max_length=32), MapKeys(("type",))] = Field(
        default=(), description="Accepted, Admitted, ClusterReady, Running, Progressing, Resizing and others."
    )
