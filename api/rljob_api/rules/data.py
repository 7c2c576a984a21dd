"""Rules about model, data and reward."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence

from rljob_api.rules.registry import Job, rule
from rljob_api.spec.data import Task
from rljob_api.violations import Violation

NEEDS_ANSWER = ("gsm8k", "math", "exactMatch")
SMALLEST_VLLM_HEAD = 32
TASK_COLUMNS = ("question", "answer")
"""Of the rows of a generated task."""
TEMPLATE = r"([^{}]|\{\{|\}\}|\{([^{}!:\[]|\[[^\[\]{}]*\])+\})*"
"""A prompt with columns in braces, in the syntax that Python and CEL share; braces themselves are written twice."""


def exactly_one(path: str, names: Sequence[str], given: Sequence[object]) -> Iterator[Violation]:
    """A violation unless exactly one of several fields is there."""
    present = [name for name, value in zip(names, given, strict=True) if value]
    listed = " and ".join(names) if len(names) == 2 else ", ".join(names)
    if not present:
        yield Violation(path, f"needs one of {listed}", f"add {names[0]}, or another of them")
    elif len(present) > 1:
        yield Violation(path, f"has {' and '.join(present)}, of which only one can be", f"keep one of {listed}")


@rule
def model_is_source_or_random(job: Job) -> Iterator[Violation]:
    model = job.spec.model
    yield from exactly_one("spec.model", ("source", "random"), (model.source, model.random))


@rule
def random_model_has_no_source_settings(job: Job) -> Iterator[Violation]:
    model = job.spec.model
    if model.random is None:
        return
    for name, value in (("revision", model.revision), ("tokenizer", model.tokenizer)):
        if value is not None:
            yield Violation(
                f"spec.model.{name}",
                "has no meaning for a random model",
                "remove it" if name == "revision" else "use spec.model.random.tokenizer",
            )


@rule
def random_tokenizer_is_characters_or_source(job: Job) -> Iterator[Violation]:
    if random := job.spec.model.random:
        tokenizer = random.tokenizer
        path = "spec.model.random.tokenizer"
        yield from exactly_one(path, ("characters", "source"), (tokenizer.characters, tokenizer.source))


@rule
def tokenizer_characters_differ(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    characters = (random.tokenizer.characters or "") if random else ""
    if twice := sorted({c for c in characters if characters.count(c) > 1}):
        yield Violation(
            "spec.model.random.tokenizer.characters",
            f"has {', '.join(map(repr, twice))} more than once",
            "name each character once",
        )


@rule
def heads_divide_hidden_size(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    if random and random.hidden_size % random.heads:
        yield Violation(
            "spec.model.random.heads",
            f"{random.heads} does not divide hiddenSize = {random.hidden_size}",
            "choose heads that divide it",
        )


@rule
def kv_heads_divide_heads(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    if random and random.kv_heads and random.heads % random.kv_heads:
        yield Violation(
            "spec.model.random.kvHeads",
            f"{random.kv_heads} does not divide heads = {random.heads}",
            "choose a divisor of heads",
        )


@rule
def vllm_needs_wide_heads(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    if random and job.spec.rollout.engine == "vllm" and random.hidden_size < SMALLEST_VLLM_HEAD * random.heads:
        yield Violation(
            "spec.model.random.heads",
            f"hiddenSize / heads = {random.hidden_size / random.heads:g} is less than {SMALLEST_VLLM_HEAD}, "
            "which vLLM cannot run",
            "use fewer heads, a larger hiddenSize, or rollout.engine: torch",
        )


@rule
def lengths_fit_the_random_models_context(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    if random is None:
        return
    prompt, response = job.spec.data.max_prompt_tokens, job.spec.rollout.max_response_tokens
    if prompt + response > random.context_length:
        yield Violation(
            "spec.model.random.contextLength",
            f"{random.context_length} is less than data.maxPromptTokens + rollout.maxResponseTokens = "
            f"{prompt} + {response}",
            f"raise it to {prompt + response}, or lower one of the two",
        )


@rule
def training_data_has_one_origin(job: Job) -> Iterator[Violation]:
    train = job.spec.data.train
    given = (train.source, train.task, train.parts)
    yield from exactly_one("spec.data.train", ("source", "task", "parts"), given)
    for index, part in enumerate(train.parts):
        yield from exactly_one(f"spec.data.train.parts[{index}]", ("source", "task"), (part.source, part.task))


@rule
def parts_have_names(job: Job) -> Iterator[Violation]:
    names: set[str] = set()
    for index, part in enumerate(job.spec.data.train.parts):
        path = f"spec.data.train.parts[{index}].name"
        if part.name is None:
            yield Violation(path, "is required for each of several parts", "give the part a name")
        elif part.name in names:
            yield Violation(path, f'"{part.name}" is the name of another part too', "give each part its own name")
        names.add(part.name or "")


@rule
def parts_stand_alone(job: Job) -> Iterator[Violation]:
    train = job.spec.data.train
    if not train.parts:
        return
    for name in ("name", "split", "limit"):
        if getattr(train, name) is not None:
            yield Violation(f"spec.data.train.{name}", "has no meaning beside parts", "set it on the parts")


@rule
def tasks_have_no_split(job: Job) -> Iterator[Violation]:
    places = [(path, part.task, part.split) for path, part in job.train_parts]
    places += [(f"spec.data.validation[{i}]", part.task, part.split) for i, part in enumerate(job.spec.data.validation)]
    for path, task, split in places:
        if task is not None and split is not None:
            yield Violation(f"{path}.split", "a generated task has no splits", "remove it")


@rule
def validation_sets_have_one_origin(job: Job) -> Iterator[Violation]:
    for index, part in enumerate(job.spec.data.validation):
        yield from exactly_one(f"spec.data.validation[{index}]", ("source", "task"), (part.source, part.task))


@rule
def validation_names_differ(job: Job) -> Iterator[Violation]:
    names: set[str] = set()
    for index, part in enumerate(job.spec.data.validation):
        if part.name in names:
            yield Violation(
                f"spec.data.validation[{index}]",
                f'"{part.name}" is the name of another set too',
                "give each set its own name",
            )
        names.add(part.name)


@rule
def greedy_validation_takes_one_sample(job: Job) -> Iterator[Violation]:
    for index, part in enumerate(job.spec.data.validation):
        if part.samples_per_prompt > 1 and part.sampling.temperature == 0:
            yield Violation(
                f"spec.data.validation[{index}].samplesPerPrompt",
                f"{part.samples_per_prompt} samples at temperature 0 are all the same",
                "set sampling.temperature above 0, or samplesPerPrompt to 1",
            )


@rule
def validation_lengths_fit_the_random_models_context(job: Job) -> Iterator[Violation]:
    random = job.spec.model.random
    for index, part in enumerate(job.spec.data.validation):
        longest, prompt = part.sampling.max_response_tokens, job.spec.data.max_prompt_tokens
        if random and longest and prompt + longest > random.context_length:
            yield Violation(
                f"spec.data.validation[{index}].sampling.maxResponseTokens",
                f"with data.maxPromptTokens = {prompt} it exceeds the model's context of {random.context_length}",
                f"lower it to {max(1, random.context_length - prompt)}",
            )


@rule
def prompt_template_is_well_formed(job: Job) -> Iterator[Violation]:
    prompt = job.spec.data.prompt
    if re.search("[{}]", prompt) and not re.fullmatch(TEMPLATE, prompt):
        yield Violation(
            "spec.data.prompt",
            "is a malformed template: each place must name a column and nothing else",
            "name a column in braces, as in {question}; write {{ and }} for braces themselves",
        )


@rule
def tasks_have_the_columns(job: Job) -> Iterator[Violation]:
    data = job.spec.data
    tasks = [part.task for _, part in job.train_parts] + [part.task for part in data.validation]
    types = [task.type for task in tasks if task is not None]
    if not types:
        return
    is_template = bool(re.search("[{}]", data.prompt))
    if is_template and not re.fullmatch(TEMPLATE, data.prompt):
        # That is told by another rule.
        return
    named = [name for _, name, _, _ in string.Formatter().parse(data.prompt) if name] if is_template else [data.prompt]
    wanted = [("spec.data.prompt", name) for name in named] + [("spec.data.answer", data.answer or TASK_COLUMNS[0])]
    for path, name in wanted:
        if name not in TASK_COLUMNS:
            yield Violation(
                path, f'the task {types[0]} has no column "{name}"', f"it has {' and '.join(TASK_COLUMNS)}; name one"
            )


@rule
def chat_has_a_template(job: Job) -> Iterator[Violation]:
    # Of tokenizers in files the look at the files says it.
    data, model = job.spec.data, job.spec.model
    by_characters = model.random is not None and model.random.tokenizer.characters is not None
    has_none = by_characters and model.chat_template is None
    if data.chat == "always" and has_none:
        yield Violation(
            "spec.data.chat",
            "always needs a chat template, and a tokenizer of characters has none",
            "set spec.model.chatTemplate, or chat: never",
        )
    elif data.system_prompt and data.chat != "always" and (data.chat == "never" or has_none):
        yield Violation(
            "spec.data.systemPrompt",
            "needs a chat template, and none is applied here",
            "write the text into the template of spec.data.prompt instead",
        )


@rule
def tasks_have_enough_problems(job: Job) -> Iterator[Violation]:
    places: list[tuple[str, Task | None]] = [(path, part.task) for path, part in job.train_parts]
    places += [(f"spec.data.validation[{i}]", part.task) for i, part in enumerate(job.spec.data.validation)]
    for path, task in places:
        if task is None or task.size is None:
            continue
        numbers = 10 if task.digits == 1 else 9 * 10 ** (task.digits - 1)
        count = numbers**2 if task.type == "addition" else 10**task.digits
        if task.size > count:
            yield Violation(
                f"{path}.task.size",
                f"{task.type} with {task.digits} digits has only {count} different problems",
                "lower size, or raise digits",
            )


@rule
def answers_are_there_for_rewards_that_compare(job: Job) -> Iterator[Violation]:
    data = job.spec.data
    all_tasks = all(part.task is not None for _, part in job.train_parts)
    comparing = [function.type for function in job.spec.reward.functions if function.type in NEEDS_ANSWER]
    if data.answer is None and comparing and not all_tasks:
        yield Violation(
            "spec.data.answer",
            f"is required by the reward function {comparing[0]}",
            "name the column with the reference answer",
        )


@rule
def custom_rewards_name_a_function(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        path = f"spec.reward.functions[{index}].function"
        if function.type == "custom" and function.function is None:
            yield Violation(path, "is required by type custom", "write module:function, for example my_rewards:score")
        if function.type != "custom" and function.function is not None:
            yield Violation(path, f"has no meaning for type {function.type}", "remove it, or use type: custom")


@rule
def pattern_rewards_have_a_pattern(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        path = f"spec.reward.functions[{index}].pattern"
        if function.type == "pattern" and function.pattern is None:
            yield Violation(path, "is required by type pattern", "write a regular expression")
        if function.type != "pattern" and function.pattern is not None:
            yield Violation(path, f"has no meaning for type {function.type}", "remove it, or use type: pattern")


@rule
def patterns_compile(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        if function.pattern is None:
            continue
        try:
            re.compile(function.pattern)
        except re.error as problem:
            path = f"spec.reward.functions[{index}].pattern"
            yield Violation(path, f"is not a regular expression: {problem}", "mend it, in Python's syntax")


@rule
def reward_names_differ(job: Job) -> Iterator[Violation]:
    names: set[str] = set()
    for index, function in enumerate(job.spec.reward.functions):
        name = function.name or function.type
        if name in names:
            yield Violation(
                f"spec.reward.functions[{index}].name",
                f'"{name}" is the name of another function too',
                "give each function its own name",
            )
        names.add(name)


@rule
def reward_sources_exist(job: Job) -> Iterator[Violation]:
    known = {part.label for _, part in job.train_parts} | {part.name for part in job.spec.data.validation}
    for index, function in enumerate(job.spec.reward.functions):
        for position, source in enumerate(function.sources):
            if source not in known:
                yield Violation(
                    f"spec.reward.functions[{index}].sources[{position}]",
                    f'there is no data source "{source}"',
                    f"use one of {', '.join(sorted(known))}",
                )


@rule
def every_source_has_a_reward(job: Job) -> Iterator[Violation]:
    functions = job.spec.reward.functions
    covered = {source for function in functions for source in function.sources}
    if any(not function.sources for function in functions):
        return
    places = [(path, part.label) for path, part in job.train_parts]
    places += [(f"spec.data.validation[{i}]", part.name) for i, part in enumerate(job.spec.data.validation)]
    for path, name in places:
        if name not in covered:
            yield Violation(
                path,
                f'no reward function applies to the source "{name}"',
                "add it to a function's sources, or leave sources out",
            )


@rule
def some_reward_counts(job: Job) -> Iterator[Violation]:
    if all(function.weight == 0 for function in job.spec.reward.functions):
        yield Violation("spec.reward.functions", "all weights are 0, so every sample scores 0", "give one a weight")


@rule
def overlong_buffer_is_shorter_than_the_response(job: Job) -> Iterator[Violation]:
    overlong, longest = job.spec.reward.overlong, job.spec.rollout.max_response_tokens
    if overlong and overlong.buffer_tokens >= longest:
        yield Violation(
            "spec.reward.overlong.bufferTokens",
            f"{overlong.buffer_tokens} is not less than rollout.maxResponseTokens = {longest}",
            "lower it (a fifth of maxResponseTokens is usual)",
        )


@rule
def reward_clip_is_a_range(job: Job) -> Iterator[Violation]:
    clip = job.spec.reward.clip
    if clip and clip.low >= clip.high:
        yield Violation(
            "spec.reward.clip.low", f"{clip.low:g} is not below high = {clip.high:g}", "lower it, or raise high"
        )


@rule
def error_score_belongs_to_on_error_score(job: Job) -> Iterator[Violation]:
    reward = job.spec.reward
    if reward.error_score != 0 and reward.on_error != "score":
        yield Violation(
            "spec.reward.errorScore",
            f"has no meaning with onError: {reward.on_error}",
            "set onError: score, or remove it",
        )
