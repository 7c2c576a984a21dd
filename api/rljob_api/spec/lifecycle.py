"""Checkpoints, validation, logs, retries and deadlines: what happens around the training itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import SUSPENDED, Listed, Location, ShortText, SpecModel


class CheckpointSpec(SpecModel):
    """When and where to save checkpoints."""

    uri: Location | None = Field(
        default=None,
        description="pvc://claim/path or s3://bucket/path; a folder for `rljob run`. Default: the output folder. On "
        "a cluster none: suspend and retry then start over.",
    )
    every_steps: Annotated[int, SUSPENDED] = Field(
        default=50, ge=0, le=1000000, description="Steps between checkpoints. 0: only when the run ends or is stopped."
    )
    keep: Annotated[int, SUSPENDED] = Field(default=3, ge=1, le=1000, description="Newest checkpoints to keep.")


class Validation(SpecModel):
    """When to score the held-out sets (data.validation)."""

    every: int | None = Field(
        default=None, ge=1, le=1000000, description="Steps between validations. Default: only at start and end."
    )
    at_start: bool = Field(default=True, description="Score the model before the first step.")
    bootstrap: int = Field(default=1000, ge=1, le=100000, description="Bootstrap resamples for best@k and maj@k.")


class Wandb(SpecModel):
    """Weights & Biases. Set the key in the environment (WANDB_API_KEY)."""

    project: ShortText = Field(description="Project.")
    entity: ShortText | None = Field(default=None, description="User or team.")
    name: ShortText | None = Field(default=None, description="Run name. Default: the job's.")
    tags: Annotated[Listed[ShortText], Field(max_length=32)] = Field(default=(), description="Run tags.")


class Mlflow(SpecModel):
    """MLflow. Set credentials in the environment."""

    experiment: ShortText = Field(description="Experiment.")
    tracking_uri: Location | None = Field(
        default=None, description="Tracking server. Default: MLFLOW_TRACKING_URI from the environment."
    )


class Logging(SpecModel):
    """What to write besides metrics.jsonl."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Log level.")
    samples_every: int = Field(
        default=10,
        ge=0,
        le=1000000,
        description="Steps between sample dumps, plus first and last step. 0: no dumps.",
    )
    samples_per_write: int = Field(default=8, ge=1, le=10000, description="Generations per dump.")
    tensorboard: bool = Field(default=True, description="Write TensorBoard files.")
    wandb: Wandb | None = Field(default=None, description="Log to Weights & Biases (extra wandb).")
    mlflow: Mlflow | None = Field(default=None, description="Log to MLflow (extra mlflow).")


class Restore(SpecModel):
    """Where a new job starts."""

    from_: Location = Field(
        alias="from",
        description="Checkpoint folder, or another job's state folder (its newest). Continues with its weights, "
        "optimizer, data position and counts (steps, samples, seconds). A coefficient or correction that changed "
        "during training carries over only if this job has the same settings for it.",
    )


class Retry(SpecModel):
    """How to handle failures."""

    limit: int = Field(default=3, ge=0, le=1000, description="Failures since the last checkpoint before the job fails.")
    backoff_seconds: int = Field(
        default=10, ge=0, le=86400, description="Wait before the first retry; doubles each time."
    )
    max_backoff_seconds: int = Field(default=600, ge=0, le=86400, description="Maximum wait between retries.")


class Deadlines(SpecModel):
    """How long things may take before the job fails with an error that names the culprit."""

    start_seconds: int = Field(
        default=3600, ge=1, le=31536000, description="From admission to the end of the first step, without pauses."
    )
    run_seconds: int | None = Field(
        default=None,
        ge=1,
        le=315360000,
        description="Total running time over all attempts, without pauses. Default: none.",
    )
    progress_seconds: int = Field(
        default=3600, ge=1, le=31536000, description="Maximum time without a finished sample, step or publication."
    )
