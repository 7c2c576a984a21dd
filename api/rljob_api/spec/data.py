"""spec.data: training and validation prompts, how they become token ids, and the sampling of responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rljob_api.spec.base import FreeForm, Listed, Location, LongText, MapKeys, ShortText, SourceName, SpecModel

TaskType = Literal["addition", "copy", "parity", "reasoningGym"]
PromptText = Annotated[str, Field(min_length=1, max_length=4096)]


class TaskSpec(SpecModel):
    """A generated data set with the columns question and answer."""

    type: TaskType = Field(
        description="addition: of two numbers. copy: of a string of digits. parity: of the ones in a string of bits, "
        "which is hardly learned without a tool. reasoningGym: a task of the package reasoning-gym."
    )
    digits: int = Field(
        default=2, ge=1, le=64, description="Digits of each number, or bits. Not of reasoningGym: its config says it."
    )
    size: int | None = Field(
        default=None,
        ge=1,
        le=100000000,
        description="Distinct problems drawn. Default: all. Of reasoningGym: problems made, which needs it.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=2147483647,
        description="Seed of the draw. One in ten is held out for validation, whatever the seed.",
    )
    name: SourceName | None = Field(
        default=None, description="reasoningGym: which of its tasks, such as basic_arithmetic."
    )
    config: FreeForm = Field(default={}, description="reasoningGym: settings of that task, as the package has them.")
    python: Location | None = Field(
        default=None,
        description="reasoningGym: the interpreter that has the package; one for all tasks of a job. Default: the one "
        "that runs the job.",
    )


class TrainPart(SpecModel):
    """One source of training prompts. Exactly one of source and task."""

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
        description="Its share of the prompts of each epoch, over the sum of all parts' weights; an epoch has as many "
        "prompts as all parts have rows. All parts have one, or none. Default: each row once an epoch.",
    )
    prompt: PromptText | None = Field(default=None, description="As data.prompt, for this part. Default: that.")
    answer: ShortText | None = Field(default=None, description="As data.answer, for this part. Default: that.")

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
    """The training prompts. Exactly one of source, task and parts."""

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
        description="Several sources, mixed by their weights, or else in proportion to their sizes; each needs a name.",
    )
    source_column: ShortText | None = Field(
        default=None,
        description="The column that says which data set a row is from: the data_source of reward functions written "
        "for verl, and the name of reward/source/<source>/mean. Default: the name of the source is.",
    )
    split: ShortText | None = Field(default=None, description="Split of a Hugging Face data set.")
    limit: int | None = Field(default=None, ge=1, le=1000000000, description="Use only the first rows.")
    seed: int = Field(default=0, ge=0, le=2147483647, description="Seed of the order of prompts.")
    shuffle: bool = Field(default=True, description="New order in each epoch; false: the order of the file.")

    @property
    def sources(self) -> tuple[TrainPart, ...]:
        """The training sources as a list, whichever way they were written."""
        if self.parts:
            return self.parts
        return (TrainPart(name=self.name, source=self.source, task=self.task, split=self.split, limit=self.limit),)


class SamplingSpec(SpecModel):
    """How tokens are drawn in training. Log-probs everywhere are at this temperature."""

    temperature: float = Field(default=1.0, gt=0, le=10, description="Logits are divided by it.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Nucleus sampling. Training needs 1 (off): the ratio would be wrong."
    )
    top_k: int = Field(
        default=0, ge=0, le=1000000, description="Sample among the k likeliest tokens. Training needs 0 (off)."
    )


class ValidationSampling(SpecModel):
    """How tokens are drawn in validation."""

    temperature: float = Field(default=0.0, ge=0, le=10, description="0: always the likeliest token.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling; 1: off.")
    top_k: int = Field(default=0, ge=0, le=1000000, description="Sample among the k likeliest tokens; 0: off.")
    max_response_tokens: int | None = Field(
        default=None, ge=1, le=16777216, description="Longest response. Default: rollout.maxResponseTokens."
    )


class ValidationSet(SpecModel):
    """One held-out set. Exactly one of source and task."""

    name: SourceName = Field(description="Names its metrics and routes rewards.")
    source: Location | None = Field(default=None, description="As data.train.source.")
    task: TaskSpec | None = Field(default=None, description="A generated task.")
    split: ShortText | None = Field(default=None, description="Split of a Hugging Face data set.")
    limit: int | None = Field(default=None, ge=1, le=1000000, description="Use only the first rows.")
    samples_per_prompt: int = Field(
        default=1, ge=1, le=1024, description="Responses per prompt: mean@n, best@k and maj@k are over these."
    )
    sampling: ValidationSampling = Field(
        default=ValidationSampling(), description="How its responses are drawn. Default: greedy."
    )


class Data(SpecModel):
    """Training and validation prompts and how they become token ids."""

    train: TrainData = Field(description="Training prompts.")
    validation: Annotated[Listed[ValidationSet], Field(max_length=32), MapKeys(("name",))] = Field(
        default=(), description="Held-out sets, scored as validation.every says."
    )
    prompt: PromptText = Field(
        default="question",
        description='The column with the prompt, or a template with columns in braces: "Add: {question}". '
        "A column may hold text or a list of chat messages.",
    )
    answer: ShortText | None = Field(default=None, description="The column with the reference answer.")
    chat: Literal["auto", "always", "never"] = Field(
        default="auto", description="Apply the tokenizer's chat template. auto: if it has one."
    )
    system_prompt: LongText | None = Field(default=None, description="System message put before each prompt.")
    max_prompt_tokens: int = Field(default=1024, ge=1, le=16777216, description="Longest prompt, tokens.")
    overlong_prompts: Literal["drop", "error", "truncate"] = Field(
        default="drop", description="What happens to longer prompts. truncate keeps the end (cuts on the left)."
    )
