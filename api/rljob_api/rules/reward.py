"""Rules about spec.reward."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import JsonValue

from rljob_api.method import ParameterKind
from rljob_api.methods import REWARD_PARAMETERS
from rljob_api.problems import did_you_mean, shown
from rljob_api.rules.cel import FUNCTION, REWARD, SPEC, Cel, one_of, text
from rljob_api.rules.registry import Job, rule
from rljob_api.violations import Violation

COMMON = r"^([^\\]|\\[dDwWsSbBnrt]|\\[!-/:-@\[-`{-~])*\\?$"
"""Matches regular expressions whose escapes Python and CEL (RE2) share."""
PYTHON_ONLY = r"\(\?[^:]|\{,|\{[0-9]*,?[0-9]{3,}|\{(.|\n)*\{|[*+?}]\+|\[\[|\[[^\]]*\\[bB]"
"""Finds what only Python may take in a regular expression: assertions, possessive and large repetitions, sets."""

IN_A_SANDBOX = ("codeTests", "reasoningGym")


@rule(
    cel=Cel(
        FUNCTION,
        # `function` is a reserved word of CEL; Kubernetes escapes it.
        "(self.type == 'custom') == has(self.__function__)",
        "is required by type custom, and only there; write module:function",
        ".function",
    )
)
def custom_rewards_name_a_function(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        path = f"spec.reward.functions[{index}].function"
        if function.type == "custom" and function.function is None:
            yield Violation(path, "is required by type custom", "write module:function, for example my_rewards:score")
        if function.type != "custom" and function.function is not None:
            yield Violation(path, f"does not apply to type {function.type}", "remove it, or use type: custom")


@rule(
    cel=Cel(
        FUNCTION,
        "(self.type == 'pattern') == has(self.pattern)",
        "is required by type pattern, and only there; write a regular expression",
        ".pattern",
    )
)
def pattern_rewards_have_a_pattern(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        path = f"spec.reward.functions[{index}].pattern"
        if function.type == "pattern" and function.pattern is None:
            yield Violation(path, "is required by type pattern", "write a regular expression")
        if function.type != "pattern" and function.pattern is not None:
            yield Violation(path, f"does not apply to type {function.type}", "remove it, or use type: pattern")


@rule(
    cel=Cel(
        (*FUNCTION, "pattern"),
        # A regular expression that is none ends the evaluation with an error, which refuses the job.
        f"!self.matches({text(COMMON)}) || self.matches({text(PYTHON_ONLY)}) ? true : [''.matches(self)].size() == 1",
        "is not a regular expression",
    ),
    not_in_cel="Python's regular expressions have more than those of CEL, which judges what they share",
)
def patterns_compile(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        if function.pattern is None:
            continue
        try:
            re.compile(function.pattern)
        # Numbers of repetitions and groups within groups have bounds of their own in Python's compiler.
        except (re.error, OverflowError, RecursionError) as problem:
            path = f"spec.reward.functions[{index}].pattern"
            yield Violation(path, f"is not a regular expression: {problem}", "fix it (Python syntax)")


@rule(not_in_cel="the content of params is hidden from CEL")
def built_in_rewards_have_these_parameters(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        known = REWARD_PARAMETERS.get(function.type)
        if known is None:
            continue
        path = f"spec.reward.functions[{index}].params"
        for name, value in function.params.items():
            if name not in known:
                close = did_you_mean(name, known)
                remedy = f"did you mean {close}?" if close else f"it takes {', '.join(known) or 'none'}"
                yield Violation(path, f"{function.type} has no parameter {name!r}", remedy)
            elif not _is(value, kind := known[name]):
                words = f"one of {', '.join(kind)}" if isinstance(kind, tuple) else _WORDS[kind]
                actual = f"the text {shown(value)}" if isinstance(value, str) else shown(value)
                yield Violation(f"{path}.{name}", f"must be {words}, not {actual}", f"write {words}")


_WORDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "text": "text",
    "object": "an object",
}


def _is(value: JsonValue, kind: ParameterKind) -> bool:
    if isinstance(kind, tuple):
        return value in kind
    if kind in ("boolean", "text", "object"):
        return isinstance(value, {"boolean": bool, "text": str, "object": dict}[kind])
    return isinstance(value, int | float if kind == "number" else int) and not isinstance(value, bool)


@rule(not_in_cel="the content of params is hidden from CEL")
def json_rewards_have_a_schema(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        if function.type == "jsonSchema" and bool(function.params.get("schema")) == bool(
            function.params.get("schemaColumn")
        ):
            yield Violation(
                f"spec.reward.functions[{index}].params",
                "type jsonSchema needs exactly one of schema and schemaColumn",
                "write the schema, or name the column that has each row's",
            )


@rule(
    cel=Cel(
        REWARD,
        f"!has(self.sandbox) || self.functions.exists(f, f.type in {one_of(IN_A_SANDBOX)})",
        "applies only to codeTests and reasoningGym; remove it, or use one of them",
        ".sandbox",
    )
)
def a_rewards_sandbox_has_tests(job: Job) -> Iterator[Violation]:
    reward = job.spec.reward
    if reward.sandbox is not None and all(function.type not in IN_A_SANDBOX for function in reward.functions):
        yield Violation(
            "spec.reward.sandbox",
            "applies only to codeTests and reasoningGym scoring, and neither is used",
            "remove it, or use one of them",
        )


@rule(
    cel=Cel(
        REWARD,
        "!has(self.sandbox) || !has(self.sandbox.url) || !self.functions.exists(f, f.type == 'reasoningGym')",
        "is a service, but reasoningGym scoring needs its package next to the driver; remove url",
        ".sandbox.url",
    )
)
def reasoning_gym_scores_beside_the_driver(job: Job) -> Iterator[Violation]:
    reward = job.spec.reward
    at_a_service = reward.sandbox is not None and reward.sandbox.url is not None
    if at_a_service and any(function.type == "reasoningGym" for function in reward.functions):
        yield Violation(
            "spec.reward.sandbox.url",
            "is a service, but reasoningGym scoring needs its package next to the driver",
            "remove it",
        )


@rule(
    cel=Cel(
        REWARD,
        "self.functions.all(f, self.functions.filter(g, "
        "(has(g.name) ? g.name : g.type) == (has(f.name) ? f.name : f.type)).size() == 1)",
        "two functions have the same name (or, without names, the same type); give each its own name",
        ".functions",
    )
)
def reward_names_differ(job: Job) -> Iterator[Violation]:
    names: set[str] = set()
    for index, function in enumerate(job.spec.reward.functions):
        name = function.name or function.type
        if name in names:
            yield Violation(
                f"spec.reward.functions[{index}].name",
                f'"{name}" is also the name of another function',
                "give each function its own name",
            )
        names.add(name)


@rule(not_in_cel="the default names of sources are made from paths")
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


@rule(not_in_cel="the default names of sources are made from paths")
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
                "add it to a function's sources, or remove sources",
            )


@rule(
    cel=Cel(
        REWARD,
        "self.functions.exists(f, f.weight != 0.0)",
        "all weights are 0, so every sample scores 0; give one a nonzero weight",
        ".functions",
    )
)
def some_reward_counts(job: Job) -> Iterator[Violation]:
    if all(function.weight == 0 for function in job.spec.reward.functions):
        yield Violation(
            "spec.reward.functions", "all weights are 0, so every sample scores 0", "give one a nonzero weight"
        )


@rule(
    cel=Cel(
        SPEC,
        "!has(self.reward.overlong) || self.reward.overlong.bufferTokens < self.rollout.maxResponseTokens",
        "must be less than rollout.maxResponseTokens; lower it (a fifth is usual)",
        ".reward.overlong.bufferTokens",
    )
)
def overlong_buffer_is_shorter_than_the_response(job: Job) -> Iterator[Violation]:
    overlong, longest = job.spec.reward.overlong, job.spec.rollout.max_response_tokens
    if overlong and overlong.buffer_tokens >= longest:
        yield Violation(
            "spec.reward.overlong.bufferTokens",
            f"{overlong.buffer_tokens} is not less than rollout.maxResponseTokens = {longest}",
            "lower it (a fifth of maxResponseTokens is usual)",
        )


@rule(cel=Cel((*REWARD, "clip"), "self.low < self.high", "must be below high; lower it", ".low"))
def reward_clip_is_a_range(job: Job) -> Iterator[Violation]:
    clip = job.spec.reward.clip
    if clip and clip.low >= clip.high:
        yield Violation(
            "spec.reward.clip.low", f"{clip.low:g} is not below high = {clip.high:g}", "lower it, or raise high"
        )


@rule(
    cel=Cel(
        REWARD,
        "self.errorScore == 0.0 || self.onError == 'score'",
        "applies only to onError: score; set that, or remove it",
        ".errorScore",
    )
)
def error_score_belongs_to_on_error_score(job: Job) -> Iterator[Violation]:
    reward = job.spec.reward
    if reward.error_score != 0 and reward.on_error != "score":
        yield Violation(
            "spec.reward.errorScore",
            f"does not apply to onError: {reward.on_error}",
            "set onError: score, or remove it",
        )
