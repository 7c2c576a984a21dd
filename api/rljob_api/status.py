"""The contract between operator and driver: what ``GET /v1/status`` answers and ``PUT /v1/desired`` takes.

The driver runs beside Ray's head and serves HTTP on ``DRIVER_PORT``. The operator reads the status and says what it
wants; the call is repeated until the status echoes its generation. Both sides use these models and nothing else.
A reader ignores status fields that it does not know (driver and operator may differ in age); a command is strict.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BeforeValidator, ConfigDict, Field

from rljob_api.spec.base import Format, Listed, SpecModel
from rljob_api.spec.pipeline import LiveSettings

DRIVER_PORT = 8470
LARGEST_BODY = 16 * 1024
"""Bytes of a command; a driver reads no more."""
STATUS_PATH = "/v1/status"
DESIRED_PATH = "/v1/desired"
METRICS_PATH = "/metrics"

Count = Annotated[int, Field(ge=0, le=1000000000000)]
PoolReplicas = Annotated[int, Field(ge=0, le=4096)]
"""As many as ``spec.rewardModel`` and ``spec.judge`` can ask for."""
Text = Annotated[str, Field(max_length=1024)]
Name = Annotated[str, Field(max_length=253)]


def _moment(value: Any) -> Any:
    return datetime.fromisoformat(value) if isinstance(value, str) else value


Instant = Annotated[AwareDatetime, BeforeValidator(_moment), Format("date-time", longest=64)]
"""A moment with its time zone; RFC 3339 in JSON."""

EngineState = Literal["starting", "loading", "serving", "validating", "paused", "draining", "drained", "lost"]
EndKind = Literal["succeeded", "failed", "suspended"]
ShareMap = Annotated[dict[Name, Annotated[float, Field(ge=0, le=1)]], Field(max_length=64)]
AgeMap = Annotated[dict[Name, Annotated[int, Field(ge=0)]], Field(max_length=256)]
RewardMap = Annotated[dict[Name, float], Field(max_length=64)]


_NOT_KEPT: set[str] = set()


class StatusModel(SpecModel):
    """A part of the status: strict about types, but not about further fields."""

    model_config = ConfigDict(extra="ignore")

    def model_post_init(self, context: Any, /) -> None:
        """Drops the record of which fields were given, 700 bytes a part: the operator holds thousands of statuses."""
        object.__setattr__(self, "__pydantic_fields_set__", _NOT_KEPT)

    def changed(self, **fields: Any) -> Self:
        """A copy with other values for these fields, which are taken as they are."""
        if unknown := fields.keys() - type(self).model_fields.keys():
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        return self.model_copy(update=fields)


class CurrentWait(StatusModel):
    """What the run waits for now, in one sentence."""

    who: Name = Field(description="Who waits: trainer, engine 3, driver ...")
    reason: Text = Field(description="For what, with figures: 412 of 512 samples; oldest running 38 s on engine 3.")
    since: Instant = Field(description="When the wait began.")
    until: Instant | None = Field(default=None, description="When the wait becomes an error. None: no deadline.")


class ReplicaStatus(StatusModel):
    """One replica of a pool: an engine or a scorer."""

    name: Name = Field(description="Its name in logs and metrics.")
    pod: Name | None = Field(default=None, description="The pod it runs in.")
    state: EngineState = Field(description="starting, loading, serving, validating, paused, draining, drained or lost.")
    version: Count | None = Field(default=None, description="Policy version that the engine serves.")
    running: Count = Field(default=0, description="Requests in progress.")
    doing: Text = Field(default="", description="What it works on or waits for, in a few words.")
    safe_to_delete: bool = Field(default=False, description="Its pod can be deleted now without losing anything.")


class RolloutStatus(StatusModel):
    """The rollout pool."""

    desired: Count = Field(description="Engines wanted.")
    ready: Count = Field(description="Engines that serve or validate.")
    engines: Annotated[Listed[ReplicaStatus], Field(max_length=4096)] = Field(default=(), description="Each engine.")


class ScoringPoolStatus(StatusModel):
    """A pool of reward models or judges."""

    desired: Count = Field(description="Replicas wanted.")
    ready: Count = Field(description="Replicas that score.")
    waiting: Count = Field(default=0, description="Samples not yet taken by a replica.")
    replicas: Annotated[Listed[ReplicaStatus], Field(max_length=4096)] = Field(default=(), description="Each replica.")


class TrainerStatus(StatusModel):
    """The trainer pool."""

    desired: Count = Field(description="Ranks wanted.")
    ready: Count = Field(description="Ranks that respond.")


class Pools(StatusModel):
    """The job's pools. With placement colocated the engines run in the trainer's pods."""

    rollout: RolloutStatus = Field(description="The engines.")
    trainer: TrainerStatus = Field(description="The ranks.")
    reward_model: ScoringPoolStatus | None = Field(
        default=None, description="The reward models; None: the job has no pool for them."
    )
    judge: ScoringPoolStatus | None = Field(default=None, description="The judges; None: the job has no pool for them.")


class Ages(StatusModel):
    """Ages in versions: for the groups trained in the last step, and counted over the run."""

    mean: float = Field(ge=0, description="Mean age.")
    max: Count = Field(description="Largest age.")
    bound: Count = Field(description="pipeline.staleness.maxAge in force.")
    oldest: AgeMap = Field(default={}, description="Groups in the run by the age of their oldest token.")
    tokens: AgeMap = Field(default={}, description="Response tokens in the run by age.")


class Throughput(StatusModel):
    """Speed over the last steps."""

    step_seconds: float = Field(ge=0, description="Duration of a step.")
    generated_tokens_per_second: float = Field(ge=0, description="Response tokens per second, all engines.")
    trained_tokens_per_second: float = Field(ge=0, description="Prompt and response tokens per second, all ranks.")
    trainer_idle: float = Field(ge=0, le=1, description="Fraction of time that the trainer waits.")
    rollout_idle: float = Field(
        ge=0, le=1, description="Fraction of time that an engine has no request, mean over engines."
    )


class Scores(StatusModel):
    """Scores of the last training step, and of the last validation per set."""

    mean: float | None = Field(default=None, description="Mean score of the last trained samples.")
    best: float | None = Field(default=None, description="Best mean score of any step.")
    validation: RewardMap = Field(default={}, description="Last validation score per set.")


class LastCheckpoint(StatusModel):
    """The newest complete checkpoint."""

    uri: Text = Field(description="Location of the checkpoint.")
    step: Count = Field(description="Step of the checkpoint.")
    time: Instant = Field(description="When it was written.")


class End(StatusModel):
    """How the attempt ended."""

    kind: EndKind = Field(description="succeeded, failed or suspended.")
    reason: Text = Field(description="One sentence: which stop condition, or which error.")
    exit_code: Annotated[int, Field(ge=0, le=255)] = Field(
        description="0 done; 64 bad job file, 65 bad data, 66 bad checkpoint (no retry helps); 73 disk full; "
        "75 try again; else a crash."
    )
    time: Instant = Field(description="When it ended.")


class Desired(SpecModel):
    """The operator's only command: idempotent, and repeated until the status echoes the generation."""

    generation: Count = Field(description="Generation of the RLJob it was made from.")
    attempt: Annotated[int, Field(ge=1)] = Field(
        description="Attempt it is for; the driver of another attempt refuses it."
    )
    rollout_replicas: Count | None = Field(default=None, description="Engines wanted; surplus ones are drained.")
    reward_model_replicas: PoolReplicas | None = Field(
        default=None, description="Reward model replicas wanted; surplus ones are drained."
    )
    judge_replicas: PoolReplicas | None = Field(
        default=None, description="Judge engines wanted; surplus ones are drained."
    )
    suspend: bool = Field(default=False, description="Write a checkpoint, then end with kind suspended.")
    settings: LiveSettings = Field(
        default=LiveSettings(), description="All settings that can change live. If none is set, they stay as they are."
    )


FREE_TEXTS = frozenset({"reason", "doing", "advice", "mismatch", "unsaved"})
"""The fields of a driver's status, at any depth, that hold sentences: all others are numbers, names and places."""


def with_free_texts(status: Any, change: Callable[[str], str]) -> Any:
    """A status as plain data with its sentences changed."""
    if isinstance(status, dict):
        return {
            name: change(value) if name in FREE_TEXTS and isinstance(value, str) else with_free_texts(value, change)
            for name, value in status.items()
        }
    return [with_free_texts(item, change) for item in status] if isinstance(status, list) else status


class DriverStatus(StatusModel):
    """Status of a run."""

    generation: Count = Field(description="Newest generation received and applied.")
    attempt: Annotated[int, Field(ge=1)] = Field(description="Number of this attempt.")
    time: Instant = Field(description="When this was written.")
    step: Count = Field(default=0, description="Completed steps.")
    version: Count = Field(default=0, description="Policy version: number of weight publications.")
    total_steps: Count | None = Field(default=None, description="Total steps, if known.")
    waiting: CurrentWait | None = Field(default=None, description="What the run waits for. None: it is working.")
    doing: Text = Field(default="", description="What the trainer works on or waits for, in one sentence.")
    beside: Annotated[Listed[CurrentWait], Field(max_length=64)] = Field(
        default=(), description="What parts other than trainer and engines wait for."
    )
    shares: ShareMap = Field(default={}, description="Fractions of the last ten minutes by trainer stage.")
    advice: Text = Field(default="", description="What would speed up the run, judging by its waits. Empty: nothing.")
    mismatch: Text = Field(default="", description="Exceeded mismatch limits. Empty: none.")
    unsaved: Text = Field(default="", description="Why the newest checkpoint failed. Empty: it did not.")
    pools: Pools = Field(description="Engines and ranks.")
    ages: Ages | None = Field(default=None, description="Ages of the last trained samples.")
    throughput: Throughput | None = Field(default=None, description="Speed. None before the first step.")
    rewards: Scores = Field(default=Scores(), description="Scores.")
    checkpoint: LastCheckpoint | None = Field(default=None, description="The newest complete checkpoint.")
    eta: Instant | None = Field(default=None, description="Expected end of the run.")
    end: End | None = Field(default=None, description="How the attempt ended. None: it is running.")

    def seconds_left(self, now: datetime) -> float | None:
        """Time to the expected end, at least 0; None when that cannot be told."""
        return max(0.0, (self.eta - now).total_seconds()) if self.eta is not None else None
