"""Rules about spec.data."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

from rljob_api.rules.cel import DATA, HAS_NO_TEMPLATE, SPEC, TRAIN, VALIDATION, Cel, among, one_of, text
from rljob_api.rules.registry import Job, exactly_one, rule
from rljob_api.spec.data import TaskSpec, TaskType
from rljob_api.violations import Violation

PART = (*TRAIN, "parts", "[]")
NEEDS_ANSWER = ("gsm8k", "math", "exactMatch", "multipleChoice", "codeTests")
TASK_COLUMNS = ("question", "answer")
"""The columns that the rows of a generated task have."""
TEMPLATE = r"([^{}]|\{\{|\}\}|\{([^{}!:\[]|\[[^\[\]{}]*\])+\})*"
"""A prompt with columns in braces, in the syntax that Python and CEL share; braces themselves are written twice."""


@rule(
    cel=[
        Cel(
            TRAIN,
            "[has(self.source), has(self.task), has(self.parts) && size(self.parts) > 0].filter(x, x).size() == 1",
            "needs exactly one of source, task and parts",
        ),
        Cel(PART, "has(self.source) != has(self.task)", "needs exactly one of source and task"),
    ]
)
def training_data_has_one_origin(job: Job) -> Iterator[Violation]:
    train = job.spec.data.train
    given = (train.source, train.task, train.parts)
    yield from exactly_one("spec.data.train", ("source", "task", "parts"), given)
    for index, part in enumerate(train.parts):
        yield from exactly_one(f"spec.data.train.parts[{index}]", ("source", "task"), (part.source, part.task))


@rule(cel=Cel(VALIDATION, "has(self.source) != has(self.task)", "needs exactly one of source and task"))
def validation_sets_have_one_origin(job: Job) -> Iterator[Violation]:
    for index, part in enumerate(job.spec.data.validation):
        yield from exactly_one(f"spec.data.validation[{index}]", ("source", "task"), (part.source, part.task))


@rule(
    cel=[
        Cel(PART, "has(self.name)", "is required when there are several parts; give the part a name", ".name"),
        Cel(
            TRAIN,
            "!has(self.parts) || self.parts.all(p, !has(p.name) || "
            "self.parts.filter(q, has(q.name) && q.name == p.name).size() == 1)",
            "two parts have the same name; give each its own",
            ".parts",
        ),
    ]
)
def parts_have_names(job: Job) -> Iterator[Violation]:
    names: set[str] = set()
    for index, part in enumerate(job.spec.data.train.parts):
        path = f"spec.data.train.parts[{index}].name"
        if part.name is None:
            yield Violation(path, "is required when there are several parts", "give the part a name")
        elif part.name in names:
            yield Violation(path, f'"{part.name}" is also the name of another part', "give each part its own name")
        names.add(part.name or "")


@rule(
    cel=Cel(
        TRAIN,
        "!has(self.parts) || self.parts.all(p, has(p.weight)) || !self.parts.exists(p, has(p.weight))",
        "some parts have a weight and others do not; give a weight to all or to none",
        ".parts",
    )
)
def all_parts_have_weights_or_none(job: Job) -> Iterator[Violation]:
    parts = job.spec.data.train.parts
    without = [index for index, part in enumerate(parts) if part.weight is None]
    if without and len(without) < len(parts):
        yield Violation(
            f"spec.data.train.parts[{without[0]}].weight",
            "is missing, but other parts have one",
            "give a weight to all parts or to none",
        )


@rule(
    cel=[
        Cel(
            TRAIN,
            f"!has(self.parts) || size(self.parts) == 0 || !has(self.{name})",
            "cannot be combined with parts; set it on the parts",
            f".{name}",
        )
        for name in ("name", "split", "limit")
    ]
)
def parts_stand_alone(job: Job) -> Iterator[Violation]:
    train = job.spec.data.train
    if not train.parts:
        return
    for name in ("name", "split", "limit"):
        if getattr(train, name) is not None:
            yield Violation(f"spec.data.train.{name}", "cannot be combined with parts", "set it on the parts")


@rule(
    cel=[
        Cel(at, "!has(self.task) || !has(self.split)", "a generated task has no splits; remove it", ".split")
        for at in (TRAIN, PART, VALIDATION)
    ]
)
def tasks_have_no_split(job: Job) -> Iterator[Violation]:
    places = [(path, part.task, part.split) for path, part in job.train_parts]
    places += [(f"spec.data.validation[{i}]", part.task, part.split) for i, part in enumerate(job.spec.data.validation)]
    for path, task, split in places:
        if task is not None and split is not None:
            yield Violation(f"{path}.split", "a generated task has no splits", "remove it")


def _problems(kind: TaskType, digits: int) -> int:
    """How many different problems there are of a task with numbers of so many digits."""
    if kind == "copy":
        return int(10**digits)
    numbers = 10 if digits == 1 else 9 * 10 ** (digits - 1)
    return int(numbers**2)


# By number of digits. The largest size that a job may ask for is 1e8, so larger powers need not be known.
_COPIES = [_problems("copy", digits) for digits in range(9)]
_ADDITIONS = [0, *(_problems("addition", digits) for digits in range(1, 5))]


@rule(
    cel=[
        Cel(
            (*at, "task"),
            f"!has(self.size) || self.type == 'reasoningGym' || (self.type == 'copy' ? "
            f"self.digits >= {len(_COPIES)} || self.size <= {_COPIES}[self.digits] : "
            f"self.digits >= {len(_ADDITIONS)} || self.size <= {_ADDITIONS}[self.digits])",
            "there are fewer different problems; lower size, or raise digits",
            ".size",
        )
        for at in (TRAIN, PART, VALIDATION)
    ]
)
def tasks_have_enough_problems(job: Job) -> Iterator[Violation]:
    places: list[tuple[str, TaskSpec | None]] = [(path, part.task) for path, part in job.train_parts]
    places += [(f"spec.data.validation[{i}]", part.task) for i, part in enumerate(job.spec.data.validation)]
    for path, task in places:
        if task is None or task.size is None or task.type == "reasoningGym":
            continue
        numbers = 10 if task.digits == 1 else 9 * 10 ** (task.digits - 1)
        count = numbers**2 if task.type == "addition" else 10**task.digits
        if task.size > count:
            yield Violation(
                f"{path}.task.size",
                f"{task.type} with {task.digits} digits has only {count} different problems",
                "lower size, or raise digits",
            )


_GYM = "self.type == 'reasoningGym'"


@rule(
    cel=[
        entry
        for at in (TRAIN, PART, VALIDATION)
        for entry in (
            Cel((*at, "task"), f"({_GYM}) == has(self.name)", "is required for reasoningGym, and only there", ".name"),
            Cel((*at, "task"), f"!({_GYM}) || has(self.size)", "is required by reasoningGym", ".size"),
            Cel((*at, "task"), f"({_GYM}) || !has(self.python)", "applies only to reasoningGym; remove it", ".python"),
            Cel(
                (*at, "task"),
                f"!({_GYM}) || self.digits == 2",
                "does not apply to reasoningGym; remove it, and put the task's settings into config",
                ".digits",
            ),
        )
    ]
)
def tasks_say_what_their_type_takes(job: Job) -> Iterator[Violation]:
    for path, task in _tasks(job):
        at = f"{path}.task"
        if task.type != "reasoningGym":
            for name in ("name", "python"):
                if getattr(task, name):
                    yield Violation(f"{at}.{name}", f"does not apply to the task {task.type}", "remove it")
            continue
        if task.name is None:
            yield Violation(
                f"{at}.name", "is required by reasoningGym", "name one of its tasks, for example basic_arithmetic"
            )
        if task.size is None:
            yield Violation(f"{at}.size", "is required by reasoningGym", "set the number of problems to generate")
        if task.digits != 2:
            yield Violation(
                f"{at}.digits", "does not apply to reasoningGym", "remove it; put the task's settings into config"
            )


@rule(not_in_cel="the content of config is hidden from CEL")
def tasks_take_their_config(job: Job) -> Iterator[Violation]:
    for path, task in _tasks(job):
        if task.config and task.type != "reasoningGym":
            yield Violation(f"{path}.task.config", f"does not apply to the task {task.type}", "remove it")
            continue
        for name in sorted({"seed", "size"} & set(task.config)):
            yield Violation(
                f"{path}.task.config", f"{name} is a field of the task itself", f"write it next to config: task.{name}"
            )


@rule(not_in_cel="it compares fields of three lists")
def gym_tasks_share_a_python(job: Job) -> Iterator[Violation]:
    tasks = [(path, task) for path, task in _tasks(job) if task.type == "reasoningGym"]
    for path, task in tasks[1:]:
        first = tasks[0][1].python
        if task.python != first:
            yield Violation(
                f"{path}.task.python",
                f"is {task.python or 'not set'}, but {tasks[0][0]}.task.python is {first or 'not set'}",
                "use the same for all tasks; one process scores them",
            )


@rule(not_in_cel="it compares names of data sources, which have defaults of their own")
def gym_tasks_are_scored_by_their_own_reward(job: Job) -> Iterator[Violation]:
    data = job.spec.data
    sources = [(path, part.label, part.task) for path, part in job.train_parts]
    sources += [(f"spec.data.validation[{i}]", part.name, part.task) for i, part in enumerate(data.validation)]
    functions = [
        (index, function) for index, function in enumerate(job.spec.reward.functions) if function.type == "reasoningGym"
    ]
    for path, name, task in sources:
        own = task is not None and task.type == "reasoningGym"
        scoring = [index for index, function in functions if not function.sources or name in function.sources]
        if own and not scoring:
            yield Violation(
                f"{path}.task.type",
                f'no reward function scores the data source "{name}" with reasoning-gym',
                "add {type: reasoningGym} to spec.reward.functions"
                + (f', or add "{name}" to the sources of the existing one' if functions else ""),
            )
        elif scoring and not own:
            yield Violation(
                f"spec.reward.functions[{scoring[0]}]",
                f'the data source "{name}" has no reasoning-gym problems, which type reasoningGym needs',
                "list the sources that have them (sources), or use another type",
            )


def _tasks(job: Job) -> list[tuple[str, TaskSpec]]:
    places: list[tuple[str, TaskSpec | None]] = [(path, part.task) for path, part in job.train_parts]
    places += [(f"spec.data.validation[{i}]", part.task) for i, part in enumerate(job.spec.data.validation)]
    return [(path, task) for path, task in places if task is not None]


@rule(not_in_cel="the list is a map by name: the API server itself refuses duplicates")
def validation_names_differ(job: Job) -> Iterator[Violation]:
    names: set[str] = set()
    for index, part in enumerate(job.spec.data.validation):
        if part.name in names:
            yield Violation(
                f"spec.data.validation[{index}]",
                f'"{part.name}" is also the name of another set',
                "give each set its own name",
            )
        names.add(part.name)


@rule(
    cel=Cel(
        VALIDATION,
        "self.samplesPerPrompt == 1 || self.sampling.temperature > 0.0",
        "several samples at temperature 0 are all the same; set sampling.temperature above 0",
        ".samplesPerPrompt",
    )
)
def greedy_validation_takes_one_sample(job: Job) -> Iterator[Violation]:
    for index, part in enumerate(job.spec.data.validation):
        if part.samples_per_prompt > 1 and part.sampling.temperature == 0:
            yield Violation(
                f"spec.data.validation[{index}].samplesPerPrompt",
                f"{part.samples_per_prompt} samples at temperature 0 are all the same",
                "set sampling.temperature above 0, or samplesPerPrompt to 1",
            )


@rule(
    cel=[
        Cel(
            (*at, "prompt"),
            f"!self.matches('[{{}}]') || self.matches({text(f'^{TEMPLATE}$')})",
            "is a malformed template; write a column in braces, as in {question}, and {{ and }} for literal braces",
        )
        for at in (DATA, PART)
    ]
)
def prompt_template_is_well_formed(job: Job) -> Iterator[Violation]:
    prompts = [("spec.data.prompt", job.spec.data.prompt)]
    prompts += [(f"{path}.prompt", part.prompt) for path, part in job.train_parts if part.prompt is not None]
    for path, prompt in prompts:
        if re.search("[{}]", prompt) and not re.fullmatch(TEMPLATE, prompt):
            yield Violation(
                path,
                "is a malformed template: braces must enclose a column name and nothing else",
                "write a column in braces, as in {question}; write {{ and }} for literal braces",
            )


@rule(
    cel=[
        Cel(
            SPEC,
            f"self.data.chat != 'always' || !{HAS_NO_TEMPLATE}",
            "always needs a chat template, but a tokenizer of characters has none; set spec.model.chatTemplate",
            ".data.chat",
        ),
        Cel(
            SPEC,
            "!has(self.data.systemPrompt) || self.data.systemPrompt == '' || self.data.chat == 'always' || "
            f"(self.data.chat == 'auto' && !{HAS_NO_TEMPLATE})",
            "needs a chat template, but none is applied here; put the text into the template of spec.data.prompt",
            ".data.systemPrompt",
        ),
    ]
)
def chat_has_a_template(job: Job) -> Iterator[Violation]:
    # Of tokenizers in files the look at the files says it.
    data, has_none = job.spec.data, job.has_no_template
    if data.chat == "always" and has_none:
        yield Violation(
            "spec.data.chat",
            "always needs a chat template, but a tokenizer of characters has none",
            "set spec.model.chatTemplate, or chat: never",
        )
    elif data.system_prompt and data.chat != "always" and (data.chat == "never" or has_none):
        yield Violation(
            "spec.data.systemPrompt",
            "needs a chat template, but none is applied here",
            "put the text into the template of spec.data.prompt instead",
        )


def _tasks_lean_on(field: str) -> str:
    """Whether a generated task takes what data.prompt or data.answer says, in CEL."""
    return (
        "(has(self.train.task) && (!has(self.train.parts) || self.train.parts.size() == 0) || "
        f"(has(self.train.parts) && self.train.parts.exists(p, has(p.task) && !has(p.{field}))) || "
        "(has(self.validation) && self.validation.exists(v, has(v.task))))"
    )


_COLUMNS = f"a generated task has only the columns {' and '.join(TASK_COLUMNS)}"
_NAMES_COLUMNS = text(rf"^([^{{}}]|\{{\{{|\}}\}}|\{{({'|'.join(TASK_COLUMNS)})\}})*$")
_IS_OF_TASKS = (
    f"{among('self.prompt', TASK_COLUMNS)} || (self.prompt.matches('[{{}}]') && self.prompt.matches({_NAMES_COLUMNS}))"
)


@rule(
    cel=[
        Cel(DATA, f"!{_tasks_lean_on('prompt')} || {_IS_OF_TASKS}", f"{_COLUMNS}; use one of them", ".prompt"),
        Cel(
            DATA,
            f"!{_tasks_lean_on('answer')} || !has(self.answer) || {among('self.answer', TASK_COLUMNS)}",
            f"{_COLUMNS}; use one of them",
            ".answer",
        ),
        Cel(PART, f"!has(self.task) || !has(self.prompt) || {_IS_OF_TASKS}", f"{_COLUMNS}; use one of them", ".prompt"),
        Cel(
            PART,
            f"!has(self.task) || !has(self.answer) || {among('self.answer', TASK_COLUMNS)}",
            f"{_COLUMNS}; use one of them",
            ".answer",
        ),
    ]
)
def tasks_have_the_columns(job: Job) -> Iterator[Violation]:
    data = job.spec.data
    wanted: dict[tuple[str, str], str] = {}
    """The task by where a column is named, and its name."""
    places = [(path, part.task, part.prompt, part.answer) for path, part in job.train_parts]
    places += [("spec.data", part.task, None, None) for part in data.validation]
    for path, task, prompt, answer in places:
        if task is None:
            continue
        at = "spec.data.prompt" if prompt is None else f"{path}.prompt"
        for name in _named_columns(data.prompt if prompt is None else prompt):
            wanted.setdefault((at, name), task.type)
        at = "spec.data.answer" if answer is None else f"{path}.answer"
        wanted.setdefault((at, answer or data.answer or TASK_COLUMNS[1]), task.type)
    for (at, name), task_type in wanted.items():
        if name not in TASK_COLUMNS:
            yield Violation(
                at,
                f'the task {task_type} has no column "{name}"',
                f"it has {' and '.join(TASK_COLUMNS)}; use one of them",
            )


def _named_columns(prompt: str) -> list[str]:
    """The columns that a prompt names; none of a malformed template, which another rule tells."""
    if not re.search("[{}]", prompt):
        return [prompt]
    if not re.fullmatch(TEMPLATE, prompt):
        return []
    return [name for _, name, _, _ in string.Formatter().parse(prompt) if name]


@rule(
    cel=Cel(
        TRAIN,
        "!has(self.sourceColumn) || "
        "!(has(self.task) && (!has(self.parts) || self.parts.size() == 0) || "
        "(has(self.parts) && self.parts.exists(p, has(p.task)))) || "
        f"{among('self.sourceColumn', TASK_COLUMNS)}",
        f"{_COLUMNS}; remove it, or the task",
        ".sourceColumn",
    )
)
def tasks_have_the_source_column(job: Job) -> Iterator[Violation]:
    train = job.spec.data.train
    tasks = [part.task.type for _, part in job.train_parts if part.task is not None]
    if train.source_column is not None and tasks and train.source_column not in TASK_COLUMNS:
        yield Violation(
            "spec.data.train.sourceColumn",
            f'the task {tasks[0]} has no column "{train.source_column}"',
            f"it has only {' and '.join(TASK_COLUMNS)}; remove sourceColumn, or the task",
        )


@rule(
    cel=Cel(
        SPEC,
        f"has(self.data.answer) || !self.reward.functions.exists(f, f.type in {one_of(NEEDS_ANSWER)}) || "
        "has(self.data.train.task) || (has(self.data.train.parts) && size(self.data.train.parts) > 0 && "
        "self.data.train.parts.all(p, has(p.task) || has(p.answer)))",
        "is required by a reward function that compares; set it to the column with the reference answer",
        ".data.answer",
    )
)
def answers_are_there_for_rewards_that_compare(job: Job) -> Iterator[Violation]:
    data = job.spec.data
    all_have = all(part.task is not None or part.answer is not None for _, part in job.train_parts)
    comparing = [function.type for function in job.spec.reward.functions if function.type in NEEDS_ANSWER]
    if data.answer is None and comparing and not all_have:
        yield Violation(
            "spec.data.answer",
            f"is required by the reward function {comparing[0]}",
            "set it to the column with the reference answer",
        )
