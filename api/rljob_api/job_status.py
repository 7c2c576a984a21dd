"""The status of an RLJob: what the operator writes, the API server stores and users see.

These models are the schema of ``.status`` in the CRD and what the operator works with, so that each field is named
once. The parts that come from the driver are made of its own answer (``rljob_api.status``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from rljob_api.spec.base import Listed, MapKeys
from rljob_api.status import Count, DriverStatus, Instant, LastCheckpoint, Name, StatusModel, Text

LARGEST_FIGURE = 1e18
Figure = Annotated[float, Field(ge=-LARGEST_FIGURE, le=LARGEST_FIGURE)]
Word = Annotated[str, AfterValidator(sys.intern)]
"""Text that is the same in thousands of jobs, and kept once."""
ConditionValue = Literal["True", "False", "Unknown"]
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


def _nothing(value: Any) -> bool:
    """Whether a field is left out of the document: empty text, list or map, 0 or false where that is the rule."""
    return not value


class Condition(StatusModel):
    """A condition, as for every Kubernetes object."""

    type: Annotated[Word, Field(min_length=1, max_length=316)] = Field(description="Name of the condition.")
    status: ConditionValue = Field(description="Whether it holds.")
    reason: Annotated[Word, Field(min_length=1, max_length=1024)] = Field(description="Why, in one word.")
    message: Annotated[str, Field(max_length=32768)] = Field(default="", description="Why, in a sentence.")
    observed_generation: Count = Field(default=0, description="Generation that the condition is about.")
    since: Instant = Field(default=LONG_AGO, alias="lastTransitionTime", description="When the status last changed.")

    @property
    def is_true(self) -> bool:
        return self.status == "True"


class Attempt(StatusModel):
    """One run of the driver."""

    number: Count = Field(alias="attempt", description="Number of the attempt.")
    incarnation: Count = Field(default=1, description="Number of its Ray cluster.")
    started: Instant = Field(default=LONG_AGO, alias="startTime", description="When it started.")
    ended: Instant | None = Field(default=None, alias="endTime", description="When it ended.")
    reason: Name = Field(default="", exclude_if=_nothing, description="How it ended, in one word.")
    message: Annotated[str, Field(max_length=4096)] = Field(
        default="", exclude_if=_nothing, description="How it ended; while running, which pods were lost."
    )
    exit_code: Annotated[int, Field(ge=-255, le=255)] | None = Field(
        default=None, description="The driver's exit code."
    )
    checkpoint_step: Count | None = Field(default=None, description="Step of the newest checkpoint when it ended.")
    counted: bool = Field(default=False, description="Whether it counts against spec.retry.limit.")
    disrupted: bool = Field(
        default=False, exclude_if=_nothing, description="A pod was evicted or lost its node during the attempt."
    )
    lines: Annotated[Listed[Annotated[str, Field(max_length=2048)]], Field(max_length=64)] = Field(
        default=(), alias="lastLines", exclude_if=_nothing, description="The driver's last lines, with secrets masked."
    )


class PoolStatus(StatusModel):
    """Status of one pool, in replicas."""

    desired: Count = Field(default=0, description="Replicas wanted.")
    replicas: Count = Field(default=0, description="Replicas that exist.")
    ready: Count = Field(default=0, description="Replicas that are ready.")
    summary: Annotated[str, Field(max_length=64)] = Field(default="", description="Ready and wanted: `3/4`.")
    selector: Annotated[str, Field(max_length=2048)] = Field(default="", description="Label selector of its pods.")


class ProgressStatus(StatusModel):
    """Training progress, from the driver."""

    step: Count = Field(default=0, description="Completed steps.")
    version: Count = Field(default=0, description="Policy version.")
    total_steps: Count | None = Field(default=None, description="Total steps, if known.")
    reward: Figure | None = Field(default=None, description="Mean score of the last step.")
    best_reward: Figure | None = Field(default=None, description="Best mean score of any step.")
    validation: Annotated[dict[Name, Figure], Field(max_length=64)] = Field(
        default={}, exclude_if=_nothing, description="Last validation score per set."
    )
    step_seconds: Figure | None = Field(default=None, description="Duration of a step.")
    tokens_per_second: Figure | None = Field(default=None, description="Response tokens per second, all engines.")
    trainer_idle: Figure | None = Field(default=None, description="Fraction of time that the trainer waits.")
    rollout_idle: Figure | None = Field(default=None, description="Fraction of time that the engines wait.")
    oldest_age: Count | None = Field(default=None, description="Largest age in the last trained groups, in versions.")
    age_bound: Count | None = Field(default=None, description="Maximum age: staleness.maxAge in force.")
    unsaved: Text = Field(
        default="",
        exclude_if=_nothing,
        description="Why the newest checkpoint failed; absent: it did not.",
    )
    waiting_for: Annotated[str, Field(max_length=2048)] | None = Field(
        default=None, description="What the run waits for."
    )
    eta: Instant | None = Field(default=None, description="Expected end of the run.")
    engines_ready: Count | None = Field(default=None, description="Engines that serve or validate.")
    ranks_ready: Count | None = Field(default=None, description="Trainer ranks that respond.")
    scorers_ready: Count | None = Field(default=None, description="Reward model replicas that score.")
    judges_ready: Count | None = Field(default=None, description="Judge engines that respond.")

    @classmethod
    def of(cls, driver: DriverStatus) -> ProgressStatus:
        """What of a driver's answer stands in the status. Figures have four digits: they are for people to read."""
        speed, ages, waiting = driver.throughput, driver.ages, driver.waiting
        return cls(
            step=driver.step,
            version=driver.version,
            total_steps=driver.total_steps,
            reward=_figure(driver.rewards.mean),
            best_reward=_figure(driver.rewards.best),
            validation={name: _rounded(score) for name, score in driver.rewards.validation.items()},
            step_seconds=_figure(speed.step_seconds if speed else None),
            tokens_per_second=_figure(speed.generated_tokens_per_second if speed else None),
            trainer_idle=_figure(speed.trainer_idle if speed else None),
            rollout_idle=_figure(speed.rollout_idle if speed else None),
            oldest_age=ages.max if ages else None,
            age_bound=ages.bound if ages else None,
            unsaved=driver.unsaved,
            waiting_for=f"{waiting.who}: {waiting.reason}" if waiting else None,
            eta=driver.eta.replace(microsecond=0) if driver.eta else None,
            engines_ready=driver.pools.rollout.ready,
            ranks_ready=driver.pools.trainer.ready,
            scorers_ready=None if driver.pools.reward_model is None else driver.pools.reward_model.ready,
            judges_ready=None if driver.pools.judge is None else driver.pools.judge.ready,
        )

    def without_driver(self) -> Self:
        """What stays of it when the driver that said it is gone: nothing of what only a driver at work has."""
        return self.changed(
            waiting_for=None, eta=None, engines_ready=None, ranks_ready=None, scorers_ready=None, judges_ready=None
        )


def _figure(value: float | None) -> float | None:
    return None if value is None else _rounded(value)


def _rounded(value: float) -> float:
    """To four significant digits, and within what the schema allows: a driver may say anything."""
    return float(f"{max(-LARGEST_FIGURE, min(LARGEST_FIGURE, value)):.4g}")


class RLJobStatus(StatusModel):
    """What the operator has observed and done. Written only by the operator."""

    observed_generation: Count = Field(default=0, description="Generation that the status is about.")
    algorithm: Name = Field(default="", exclude_if=_nothing, description="Preset of the job.")
    incarnation: Count = Field(default=1, description="Number of the current or next Ray cluster.")
    attempt: Count = Field(default=0, description="Highest attempt started.")
    failures: Count = Field(default=0, description="Counted failures since the last checkpoint.")
    attempts: Annotated[Listed[Attempt], Field(max_length=64), MapKeys(("attempt",))] = Field(
        default=(), exclude_if=_nothing, description="The newest attempts."
    )
    ready: Annotated[str, Field(max_length=64)] = Field(
        default="", exclude_if=_nothing, description="Ready and wanted replicas of all pools: `7/8`."
    )
    pools: Annotated[dict[Name, PoolStatus], Field(max_length=16)] = Field(
        default={}, exclude_if=_nothing, description="Pools by name."
    )
    progress: ProgressStatus | None = Field(default=None, description="Training progress.")
    checkpoint: LastCheckpoint | None = Field(default=None, description="Newest complete checkpoint.")
    start_time: Instant | None = Field(default=None, description="When the job was first admitted.")
    end_time: Instant | None = Field(default=None, description="When the job ended.")
    pause_time: Instant | None = Field(default=None, description="When the job was suspended or lost its quota.")
    paused_seconds: Count = Field(default=0, exclude_if=_nothing, description="Length of earlier pauses.")
    suspend_time: Instant | None = Field(default=None, description="When suspension was requested.")
    resize_time: Instant | None = Field(default=None, description="When a pool began to shrink.")
    conditions: Annotated[Listed[Condition], Field(max_length=32), MapKeys(("type",))] = Field(
        default=(), description="Accepted, Admitted, ClusterReady, Running, Progressing, Resizing and others."
    )

    @property
    def by_type(self) -> Mapping[str, Condition]:
        """The conditions by their types."""
        return {condition.type: condition for condition in self.conditions}

    @property
    def last(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """The status of a stored object; an empty one for a new job."""
        found = cls.model_validate(document)
        return found.changed(attempts=tuple(sorted(found.attempts, key=lambda attempt: attempt.number)))

    def document(self) -> dict[str, Any]:
        """The status as the API server stores it: all that is known, times in whole seconds."""
        written: dict[str, Any] = _plain(self.model_dump(by_alias=True, exclude_none=True))
        return written


def timestamp(moment: datetime) -> str:
    """RFC 3339 in whole seconds, as Kubernetes writes times."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return timestamp(value) if isinstance(value, datetime) else value
