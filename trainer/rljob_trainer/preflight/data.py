"""A job's data, as far as they are on this machine: readable, with the columns that it names, fit to be prompts."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api import Readable, Violation
from rljob_api.problems import did_you_mean
from rljob_api.rules.data import NEEDS_ANSWER
from rljob_api.spec.data import TrainPart, ValidationSet
from rljob_trainer.errors import DataError, JobFileError, UnreachableError
from rljob_trainer.preflight.model import KnownTokenizer
from rljob_trainer.preflight.places import HUB, as_violation, unknown_scheme

if TYPE_CHECKING:
    from rljob_trainer.data.feed import Rows

_ANSWERS = 4096
_GYM_PROBLEMS = 4
"""Of a task of reasoning-gym: some take seconds to make."""
_PROMPTS = 256
"""So many first rows are looked at as prompts, and the last."""


def check_data(
    found: Readable, base: Path, tokenizer: KnownTokenizer, columns: dict[str, frozenset[str]]
) -> Iterator[Violation]:
    """What is wrong with the data. ``columns`` gets those of each source that can be looked at, by its name."""
    data = found.job.spec.data
    parts: list[tuple[str, TrainPart | ValidationSet]] = []
    for index, train in enumerate(data.train.sources):
        parts.append((f"spec.data.train.parts[{index}]" if data.train.parts else "spec.data.train", train))
    parts += [(f"spec.data.validation[{index}]", held_out) for index, held_out in enumerate(data.validation)]
    yield from _chat(found, tokenizer)
    for path, part in parts:
        if found.says(f"{path}.task" if part.task else f"{path}.source", f"{path}.split"):
            yield from _source(found, path, part, base, tokenizer, columns)


def _chat(found: Readable, tokenizer: KnownTokenizer) -> Iterator[Violation]:
    """A template that is asked for, and not there."""
    data = found.job.spec.data
    if not found.says("spec.data.chat", "spec.data.systemPrompt") or tokenizer.has_template is None:
        return
    if data.chat == "always" and not tokenizer.has_template:
        yield Violation(
            "spec.data.chat",
            "always needs a tokenizer with a chat template, but the model's has none",
            "set spec.model.chatTemplate, or use chat: never",
        )
    elif data.system_prompt and (data.chat == "never" or not tokenizer.has_template):
        yield Violation(
            "spec.data.systemPrompt",
            "needs a chat template, but none is applied here",
            "put the text into the template of spec.data.prompt instead",
        )


def _source(
    found: Readable,
    path: str,
    part: TrainPart | ValidationSet,
    base: Path,
    tokenizer: KnownTokenizer,
    columns: dict[str, frozenset[str]],
) -> Iterator[Violation]:
    """One set of rows: it must be readable, and its rows must have what prompt and answer name.

    Looked at are the rows that ``open_rows`` reads: all, but of large files only the first thousands and the last.
    """
    from rljob_trainer.data.columns import column, lacks_column, null_column

    data = found.job.spec.data
    rows: Rows | None = None
    problems: Rows | None = None
    present: tuple[str, ...]
    field = f"{path}.task.size" if part.task else f"{path}.source"
    try:
        if part.task is not None and part.task.type == "reasoningGym":
            problems = yield from _problems_of_gym(found, path, part, base)
            if problems is None:
                return
            present, row = problems.columns, problems[0]
        elif part.task is not None:
            from rljob_trainer.data.sources import TaskRows
            from rljob_trainer.data.tasks import generate

            task, split = part.task, "train" if isinstance(part, TrainPart) else "validation"
            drawn = generate(task.type, split=split, digits=task.digits, size=task.size or 1, seed=task.seed)  # type: ignore[arg-type]
            problems = TaskRows(task.type, drawn)
            present = ("question", "answer")
            row = dict.fromkeys(present, "")
        else:
            yield from unknown_scheme(field, part.source, HUB)
            if part.source is None or not readable_here(part.source, base):
                return
            from rljob_trainer.data.sources import open_rows

            rows = open_rows(part.source, split=part.split, limit=part.limit, base=base, field=field)
            if len(rows) == 0:
                yield Violation(field, f"{part.source} has no rows", "use a file with at least one row")
                return
            present, row = rows.columns, dict(rows[0])
    except (DataError, JobFileError) as error:
        yield as_violation(error, field)
        return
    columns[part.name if isinstance(part, ValidationSet) else part.label] = frozenset(present)
    asked_by, prompt, answered_by, answer = _named(found, path, part)
    wanted = [(asked_by, name) for name in _columns(prompt)]
    if answer is not None:
        wanted.append((answered_by, answer))
    said_by = "spec.data.train.sourceColumn"
    if isinstance(part, TrainPart) and data.train.source_column is not None:
        wanted.append((said_by, data.train.source_column))
    whole = True
    for place, name in wanted:
        if not found.says(place):
            continue
        try:
            column(row, name)
        except KeyError:
            close = did_you_mean(name, present)
            where = f"task {part.task.type}" if part.task else str(part.source)
            whole = False
            yield Violation(
                place,
                f'{where} has no column "{name}"; it has {", ".join(present)}',
                f"did you mean {close}?" if close else "use one of them",
            )
            continue
        if rows is None or not found.says(f"{path}.limit"):
            continue
        if (index := rows.first_without(name)) is not None:
            whole = False
            yield as_violation(lacks_column(rows.place(index), rows[index], name, place), field)
        if place in (asked_by, said_by) and (index := rows.first_null(name)) is not None:
            whole = False
            yield as_violation(null_column(rows.place(index), name, place), field)
        elif (
            place == answered_by
            and (index := rows.first_null(name)) is not None
            and (reward := _comparing(found, part)) is not None
        ):
            yield Violation(
                field,
                f'{rows.place(index)}: the column "{name}", which the reward function {reward} compares with, is null '
                "or NaN",
                "fill it in, or remove the row",
            )
    if whole and rows is not None and answer is not None and found.says(answered_by, f"{path}.limit", "spec.reward"):
        yield from _answers(found, part, field, rows, answer)
    asked = rows if problems is None else problems
    if whole and asked is not None and found.says(asked_by, "spec.data.chat", f"{path}.limit"):
        yield from _prompts(found, f"{path}.task" if part.task else field, asked, tokenizer, prompt, asked_by)


def _problems_of_gym(
    found: Readable, path: str, part: TrainPart | ValidationSet, base: Path
) -> Generator[Violation, None, Rows | None]:
    """The first problems of a task of reasoning-gym, and what the package says of the task. Nothing where the job names
    an interpreter that this machine does not have: it may be one of the image's."""
    from rljob_trainer.data.sources import FirstRows
    from rljob_trainer.gym.process import WrongTaskError, interpreter
    from rljob_trainer.gym.rows import GymRows

    task = part.task
    assert task is not None
    python = interpreter(task, base)
    unfit = task.name is None or task.size is None  # a rule has said it
    if unfit or (python is not None and not Path(python).exists()) or not found.says(f"{path}.task.python"):
        return None
    try:
        rows = FirstRows(GymRows(task, held_out=isinstance(part, ValidationSet), base=base), _GYM_PROBLEMS)
        rows[0]
        return rows
    except WrongTaskError as wrong:
        yield Violation(f"{path}.task.{wrong.field}", wrong.problem, wrong.remedy)
    except (DataError, JobFileError, UnreachableError) as error:
        yield as_violation(error, f"{path}.task.python" if isinstance(error, JobFileError) else f"{path}.task")
    return None


def _named(found: Readable, path: str, part: TrainPart | ValidationSet) -> tuple[str, str, str, str | None]:
    """Prompt and answer of a source, each behind the field that names it."""
    data = found.job.spec.data
    asked_by, prompt, answered_by, answer = "spec.data.prompt", data.prompt, "spec.data.answer", data.answer
    if isinstance(part, TrainPart):
        if part.prompt is not None:
            asked_by, prompt = f"{path}.prompt", part.prompt
        if part.answer is not None:
            answered_by, answer = f"{path}.answer", part.answer
    return asked_by, prompt, answered_by, answer


def _comparing(found: Readable, part: TrainPart | ValidationSet) -> str | None:
    """A reward function that cannot score a sample of this source without an answer, and would stop the run."""
    reward = found.job.spec.reward
    if not found.says("spec.reward") or reward.on_error != "fail":
        return None
    name = part.name if isinstance(part, ValidationSet) else part.label
    for function in reward.functions:
        if function.type in NEEDS_ANSWER and (not function.sources or name in function.sources):
            return function.type
    return None


def _answers(
    found: Readable, part: TrainPart | ValidationSet, field: str, rows: Rows, answer: str
) -> Iterator[Violation]:
    """The first row whose reference answer is none for a built-in reward that its samples have."""
    from rljob_trainer.data.columns import column
    from rljob_trainer.rewards.parameters import ParameterError, keyword_arguments
    from rljob_trainer.rewards.rules import built_in

    name = part.name if isinstance(part, ValidationSet) else part.label
    for function in found.job.spec.reward.functions:
        rule = None if function.type == "custom" else built_in(function.type)
        if rule is None or rule.check_answer is None or (function.sources and name not in function.sources):
            continue
        try:
            given = keyword_arguments(rule.function, function.params)
        except ParameterError:  # a rule has said it
            continue
        for index in sorted({*range(min(_ANSWERS, len(rows))), len(rows) - 1}):
            try:
                cell = column(rows[index], answer)
                if cell is not None:
                    rule.check_answer(cell, given)
            except (KeyError, ValueError) as error:
                yield Violation(
                    field, f"{rows.place(index)}: {error}", f"correct the row, or remove it ({function.type})"
                )
                break


def _prompts(
    found: Readable, field: str, rows: Rows, tokenizer: KnownTokenizer, prompt: str, asked_by: str
) -> Iterator[Violation]:
    """The first row that is no prompt for this tokenizer."""
    from rljob_trainer.data.columns import Template, is_template
    from rljob_trainer.data.tokenisation import as_messages, cannot_be_rendered, prompt_content, unknown_characters
    from rljob_trainer.models.tokenizer_files import rendered

    data = found.job.spec.data
    if data.chat == "always":
        uses_chat: bool | None = True
    else:
        uses_chat = False if data.chat == "never" else tokenizer.has_template
    try:
        template = Template(prompt, asked_by) if is_template(prompt) else None
    except JobFileError:  # a rule has said it
        return
    for index in sorted({*range(min(_PROMPTS, len(rows))), len(rows) - 1}):
        try:
            place = rows.place(index)
            content = prompt_content(rows[index], place, prompt, template, uses_chat=uses_chat, field=asked_by)
        except DataError as error:
            yield as_violation(error, field)
            return
        text = content if uses_chat is False and isinstance(content, str) else None
        if uses_chat and tokenizer.template is not None and found.says("spec.data.systemPrompt"):
            try:
                text = rendered(tokenizer.template, as_messages(content, data.system_prompt), tokenizer.special)
            except Exception as error:  # noqa: BLE001  templates raise what they like
                yield as_violation(cannot_be_rendered(rows.place(index), error), field)
                return
        if text is None:
            continue
        if not text and not uses_chat and tokenizer.fills_empty is False:
            yield Violation(field, f"{rows.place(index)}: the prompt has no tokens", "remove the row or fill it in")
            return
        if tokenizer.lacks_characters_of(text):
            yield as_violation(unknown_characters(rows.place(index), text), field)
            return


def readable_here(source: str, base: Path) -> bool:
    """Whether a source is, or claims to be, a file of this machine (and not a data set of the hub)."""
    source = source.removeprefix("file://")
    if "://" in source:
        return False
    path = base / Path(source).expanduser()
    claims = path.suffix in (".jsonl", ".ndjson", ".json", ".parquet") or source.startswith((".", "/", "~"))
    return claims or path.exists() or any(sign in source for sign in "*?[")


def _columns(prompt: str) -> list[str]:
    """The columns that ``data.prompt`` names: itself, or the places of the template."""
    from rljob_trainer.data.columns import Template, is_template

    try:
        return list(Template(prompt, "spec.data.prompt").columns) if is_template(prompt) else [prompt]
    except JobFileError:  # a rule has said it
        return []
