"""From ``spec.data`` to the training feed and the validation prompts."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.data.feed import PromptFeed, Rows, Source, validation_prompts
from rljob_trainer.data.sources import FirstRows, TaskRows, open_rows
from rljob_trainer.data.tasks import TaskSplit, generate
from rljob_trainer.data.tokenisation import PromptEncoder, PromptSettings
from rljob_trainer.episodes.episode import Prompt
from rljob_trainer.errors import JobFileError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rljob_api.spec.data import Data, TrainPart, ValidationSet


def training_feed(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    base: Path | None = None,
    epochs: int | None = None,
    now: datetime | None = None,
) -> PromptFeed:
    """The feed of ``spec.data.train``. ``base`` is where relative paths start; ``epochs`` None: without end; ``now``:
    the date in prompts whose chat template writes one (None: the present)."""
    encoder = PromptEncoder(tokenizer, prompt_settings(data), now)
    train = data.train
    sources = []
    for index, part in enumerate(train.sources):
        field = f"spec.data.train.parts[{index}]" if train.parts else "spec.data.train"
        settings = part_settings(data, part, field)
        its_encoder = encoder if settings == encoder.settings else PromptEncoder(tokenizer, settings, now)
        rows = rows_of(part, "train", field, base)
        sources.append(Source(source_name(part), rows, its_encoder, train.source_column, part.weight))
    return PromptFeed(sources, seed=train.seed, shuffle=train.shuffle, epochs=epochs)


def validation_sets(
    data: Data, tokenizer: PreTrainedTokenizerBase, *, base: Path | None = None, now: datetime | None = None
) -> dict[str, list[Prompt]]:
    """The prompts of each set of ``spec.data.validation``, by its name. ``now`` as for ``training_feed``."""
    encoder = PromptEncoder(tokenizer, prompt_settings(data), now)
    sets = {}
    for index, part in enumerate(data.validation):
        rows = rows_of(part, "validation", f"spec.data.validation[{index}]", base)
        # A held-out set may be without the column: then its name says what it is.
        column = data.train.source_column if data.train.source_column in rows.columns else None
        sets[part.name] = validation_prompts(Source(part.name, rows, encoder, column))
    return sets


def part_settings(data: Data, part: TrainPart, field: str) -> PromptSettings:
    """How the rows of one training source become prompts; ``field`` is its path in the job file."""
    settings = prompt_settings(data)
    if part.prompt is not None:
        settings = replace(settings, prompt=part.prompt, prompt_field=f"{field}.prompt")
    if part.answer is not None:
        settings = replace(settings, answer=part.answer, answer_field=f"{field}.answer")
    return settings


def prompt_settings(data: Data) -> PromptSettings:
    """The fields of ``spec.data`` that concern one row. Generated tasks have their answer in ``answer``."""
    answer = data.answer
    tasks = [part.task for part in data.train.sources] + [part.task for part in data.validation]
    if answer is None and any(task is not None for task in tasks):
        answer = "answer"
    return PromptSettings(
        prompt=data.prompt,
        answer=answer,
        chat=data.chat,
        system_prompt=data.system_prompt,
        max_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
    )


def source_name(part: TrainPart) -> str:
    """The name that routes rewards: the given one, the task's type, or the last part of the source's path or id."""
    if part.name is not None:
        return part.name
    if part.task is not None:
        return part.task.name or part.task.type
    source = (part.source or "").removeprefix("hf://").partition(":")[0].rstrip("/")
    return Path(source).name.split(".")[0] if source else "train"


def rows_of(part: TrainPart | ValidationSet, split: TaskSplit, field: str, base: Path | None) -> Rows:
    """The rows of one source of the job file. Tasks give the problems of ``split``, which never overlap."""
    if part.task is None:
        return open_rows(part.source or "", split=part.split, limit=part.limit, base=base, field=f"{field}.source")
    task = part.task
    rows: Rows
    if task.type == "reasoningGym":
        from rljob_trainer.gym.process import WrongTaskError
        from rljob_trainer.gym.rows import GymRows

        try:
            rows = GymRows(task, held_out=split == "validation", base=base)
        except WrongTaskError as wrong:
            raise JobFileError(f"{field}.task.{wrong.field}: {wrong}") from None
        return rows if part.limit is None or part.limit >= len(rows) else FirstRows(rows, part.limit)
    problems = generate(task.type, split=split, digits=task.digits, size=task.size, seed=task.seed)
    rows = TaskRows(task.type, problems)
    return rows if part.limit is None or part.limit >= len(rows) else FirstRows(rows, part.limit)
