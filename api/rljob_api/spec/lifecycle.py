"""Checkpoints, validation, logs, retries and deadlines: what happens around the training itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import SUSPENDED, Listed, Location, ShortText, SpecModel


class CheckpointSpec(SpecModel):
    """When the state is saved, and where."""

    uri: Location | None = Field(
        default=None,
        description="pvc://claim/path or s3://bucket/path; a folder for `rljob run`. Default: the output folder; "
        "on a cluster none, so that suspend and retry start again.",
    )
    every_steps: Annotated[int, SUSPENDED] = Field(
        default=50, ge=0, le=1000000, description="Steps between checkpoints. 0: only when the run ends or is stopped."
    )
    keep: Annotated[int, SUSPENDED] = Field(default=3, ge=1, le=1000, description="How many of the newest stay.")


class Validation(SpecModel):
    """When the held-out sets (data.validation) are scored."""

    every: int | None = Field(
        default=None, ge=1, le=1000000, description="Steps between validations. Default: only at start and end."
    )
    at_start: bool = Field(default=True, description="Score the model before the first step.")
    bootstrap: int = Field(default=1000, ge=1, le=100000, description="Resamples behind best@k and maj@k.")


class Wandb(SpecModel):
    """Weights & Biases. The key comes from the environment (WANDB_API_KEY)."""

    project: ShortText = Field(description="Project.")
    entity: ShortText | None = Field(default=None, description="User or team.")
    name: ShortText | None = Field(default=None, description="Name of the run. Default: the job's.")
    tags: Annotated[Listed[ShortText], Field(max_length=32)] = Field(default=(), description="Tags of the run.")


class Mlflow(SpecModel):
    """MLflow. Credentials come from the environment."""

    experiment: ShortText = Field(description="Experiment.")
    tracking_uri: Location | None = Field(
        default=None, description="Tracking server. Default: MLFLOW_TRACKING_URI of the environment."
    )


class Logging(SpecModel):
    """What is written besides metrics.jsonl."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Log level.")
    samples_every: int = Field(
        default=10,
        ge=0,
        le=1000000,
        description="Steps between written sample generations, besides first and last. 0: never.",
    )
    samples_per_write: int = Field(default=8, ge=1, le=10000, description="Generations in one write.")
    tensorboard: bool = Field(default=True, description="Write TensorBoard files.")
    wandb: Wandb | None = Field(default=None, description="Log to Weights & Biases (extra wandb).")
    mlflow: Mlflow | None = Field(default=None, description="Log to MLflow (extra mlflow).")


class Restore(SpecModel):
    """Where a new job starts from."""

    from_: Location = Field(
        alias="from",
        description="Checkpoint folder, or the state folder of another job (its newest). Weights, optimizer, position "
        "in the data and counts (steps, samples, seconds) go on from there; a coefficient or correction that that job "
        "had changed while it trained does only where this job has the same settings for it.",
    )


class Retry(SpecModel):
    """What happens after a failure."""

    limit: int = Field(
        default=3, ge=0, le=1000, description="Failures since the last checkpoint before the job is given up."
    )
    backoff_seconds: int = Field(
        default=10, ge=0, le=86400, description="Wait before the first retry; doubles with each."
    )
    max_backoff_seconds: int = Field(default=600, ge=0, le=86400, description="Longest wait between retries.")


class Deadlines(SpecModel):
    """How long things may take before they become an error that names the culprit."""

    start_seconds: int = Field(
        default=3600, ge=1, le=31536000, description="From admission to the end of the first step, without pauses."
    )
    run_seconds: int | None = Field(
        default=None,
        ge=1,
        le=315360000,
        description="Running time of the job, all attempts, without pauses. Default: none.",
    )
    progress_seconds: int = Field(
        default=3600, ge=1, le=31536000, description="Longest time without a finished sample, step or publication."
    )
