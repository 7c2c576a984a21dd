"""spec.data: training and validation prompts, how they become token ids, and the sampling of responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import FreeForm, Listed, Location, LongText, MapKeys, ShortText, SourceName, SpecModel

TaskType = Literal["addition", "copy", "parity", "reasoningGym"]
PromptText = Annotated[str, Field(min_length=1, max_length=4096)]


class TaskSpec(SpecModel):
    """A generated data set with columns question and answer."""

    type: TaskType = Field(
        description="addition: add two numbers. copy: repeat a string of digits. parity: of the ones in a bit "
        "string; hard to learn without a tool. reasoningGym: a task from the reasoning-gym package."
    )
    digits: int = Field(
        default=2, ge=1, le=64, description="Digits per number, or bits. Not for reasoningGym; use its config."
    )
    size: int | None = Field(
        default=None,
        ge=1,
        le=100000000,
        description="Distinct problems to draw. Default: all. Required for reasoningGym.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=2147483647,
        description="Seed of the draw. One in ten is held out for validation, with any seed.",
    )
    name: SourceName | None = Field(default=None, description="reasoningGym: name of the task, e.g. basic_arithmetic.")
    config: FreeForm = Field(default={}, description="reasoningGym: the task's settings, as in the package.")
    python: Location | None = Field(
        default=None,
        description="reasoningGym: Python interpreter with the package, the same for all tasks of a job. Default: "
        "the one that runs the job.",
    )


class TrainPart(SpecModel):
    """One source of training prompts. Set exactly one of source and task."""

    name: SourceName | None = Field(
        default=None, description="Routes rewards (functions[].sources) and names metrics. Default: from the source."
    )
    source: Location | None = Field(
        default=None,
        description="JSONL or Parquet file (or folder of them), hf://dataset[:configuration], pvc://claim/path, s3://...",
    )
    task: TaskSpec | None = Field(default=None, description="A generated task.")
    split: ShortText | None = Field(default=None, description="Split of a Hugging Face data set.")
    limit: int | None = Field(default=None, ge=1, le=1000000000, description="Use only the first rows.")
    weight: float | None = Field(
        default=None,
        gt=0,
        le=1000000,
        description="Share of each epoch's prompts, relative to the sum of weights. An epoch has as many prompts as "
        "all parts have rows. Set it on all parts or none. Default: each row once per epoch.",
    )
    prompt: PromptText | None = Field(default=None, description="Overrides data.prompt for this part.")
    answer: ShortText | None = Field(default=None, description="Overrides data.answer for this part.")

    @property
    def label(self) -> str:
        """The name that routes rewards: the given one, the task's type, or the last part of the source's path or id."""
        if self.name is not None:
            return self.name
        if self.task is not None:
            return self.task.name or self.task.type
        source = (self.source or "").removeprefix("hf://").partition(":")[0].rstrip("/")
        return source.rpartition("/")[2].partition(".")[0] or "train"


class TrainData(SpecModel):
    """Training prompts. Set exactly one of source, task and parts."""

    name: SourceName | None = Field(
        default=None, description="Routes rewards (functions[].sources) and names metrics. Default: from the source."
    )
    source: Location | None = Field(
        default=None,
        description="JSONL or Parquet file (or folder of them), hf://dataset[:configuration], pvc://claim/path, s3://...",
    )
    task: TaskSpec | None = Field(default=None, description="A generated task.")
    parts: Annotated[Listed[TrainPart], Field(max_length=32)] = Field(
        default=(),
        description="Several named sources, mixed by weight, or by size without weights.",
    )
    source_column: ShortText | None = Field(
        default=None,
        description="Column that names each row's data set: data_source for verl reward functions, and <source> in "
        "reward/source/<source>/mean. Default: the source's name is used.",
    )
    split: ShortText | None = Field(default=None, description="Split of a Hugging Face data set.")
    limit: int | None = Field(default=None, ge=1, le=1000000000, description="Use only the first rows.")
    seed: int = Field(default=0, ge=0, le=2147483647, description="Seed of the prompt order.")
    shuffle: bool = Field(default=True, description="New order in each epoch. false: file order.")

    @property
    def sources(self) -> tuple[TrainPart, ...]:
        """The training sources as a list, whichever way they were written."""
        if self.parts:
            return self.parts
        return (TrainPart(name=self.name, source=self.source, task=self.task, split=self.split, limit=self.limit),)


class SamplingSpec(SpecModel):
    """How training tokens are sampled. All log-probs are at this temperature."""

    temperature: float = Field(default=1.0, gt=0, le=10, description="Divides the logits.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Nucleus sampling. Must be 1 (off) in training, or the ratio is wrong."
    )
    top_k: int = Field(
        default=0, ge=0, le=1000000, description="Sample from the k likeliest tokens. Must be 0 (off) in training."
    )


class ValidationSampling(SpecModel):
    """How validation tokens are sampled."""

    temperature: float = Field(default=0.0, ge=0, le=10, description="0: greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling. 1: off.")
    top_k: int = Field(default=0, ge=0, le=1000000, description="Sample from the k likeliest tokens. 0: off.")
    max_response_tokens: int | None = Field(
        default=None, ge=1, le=16777216, description="Longest response. Default: rollout.maxResponseTokens."
    )


class ValidationSet(SpecModel):
    """One held-out set. Set exactly one of source and task."""

    name: SourceName = Field(description="Names metrics and routes rewards.")
    source: Location | None = Field(default=None, description="As data.train.source.")
    task: TaskSpec | None = Field(default=None, description="A generated task.")
    split: ShortText | None = Field(default=None, description="Split of a Hugging Face data set.")
    limit: int | None = Field(default=None, ge=1, le=1000000, description="Use only the first rows.")
    samples_per_prompt: int = Field(
        default=1, ge=1, le=1024, description="Responses per prompt, for mean@n, best@k and maj@k."
    )
    sampling: ValidationSampling = Field(
        default=ValidationSampling(), description="How responses are sampled. Default: greedy."
    )


class Data(SpecModel):
    """Training and validation prompts, and how they become token ids."""

    train: TrainData = Field(description="Training prompts.")
    validation: Annotated[Listed[ValidationSet], Field(max_length=32), MapKeys(("name",))] = Field(
        default=(), description="Held-out sets; validation.every sets when they are scored."
    )
    prompt: PromptText = Field(
        default="question",
        description='The prompt column, or a template with columns in braces: "Add: {question}". A column may hold '
        "text or a list of chat messages.",
    )
    answer: ShortText | None = Field(default=None, description="Column with the reference answer.")
    chat: Literal["auto", "always", "never"] = Field(
        default="auto", description="Apply the tokenizer's chat template. auto: if it has one."
    )
    system_prompt: LongText | None = Field(default=None, description="System message before each prompt.")
    max_prompt_tokens: int = Field(default=1024, ge=1, le=16777216, description="Maximum prompt length, tokens.")
    overlong_prompts: Literal["drop", "error", "truncate"] = Field(
        default="drop", description="What to do with longer prompts. truncate keeps the end (cuts on the left)."
    )
