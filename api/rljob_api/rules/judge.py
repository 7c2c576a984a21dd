"""Rules about spec.reward.functions[].judge and spec.judge, the pool that serves it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rljob_api.problems import did_you_mean
from rljob_api.rules.cel import FUNCTION, SPEC, Cel
from rljob_api.rules.registry import Job, rule
from rljob_api.spec.judge import PLACEHOLDERS, JudgeSpec, plain_label
from rljob_api.violations import Violation

_JUDGE = (*FUNCTION, "judge")
_PARSER = (*_JUDGE, "parser")
_IN_BRACES = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def _judges(job: Job) -> Iterator[tuple[str, JudgeSpec]]:
    for index, function in enumerate(job.spec.reward.functions):
        if function.judge is not None:
            yield f"spec.reward.functions[{index}].judge", function.judge


@rule(
    cel=Cel(
        FUNCTION,
        "(self.type == 'judge') == has(self.judge)",
        "is required by type judge, and only there; set its template, and baseUrl and model of an endpoint",
        ".judge",
    )
)
def judge_rewards_have_a_judge(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        path = f"spec.reward.functions[{index}].judge"
        if function.type == "judge" and function.judge is None:
            yield Violation(path, "is required by type judge", "set its template, and baseUrl and model of an endpoint")
        if function.type != "judge" and function.judge is not None:
            yield Violation(path, f"does not apply to type {function.type}", "remove it, or use type: judge")


@rule(
    cel=[
        Cel(
            _JUDGE,
            "has(self.baseUrl) == has(self.model)",
            "an endpoint needs both baseUrl and model, a judge on spec.judge neither; set both or none",
            ".model",
        ),
        Cel(
            _JUDGE,
            "has(self.baseUrl) || !has(self.apiKeyEnv)",
            "is a key for baseUrl, which is not set; remove it",
            ".apiKeyEnv",
        ),
    ]
)
def judges_at_an_endpoint_are_named(job: Job) -> Iterator[Violation]:
    for path, judge in _judges(job):
        if judge.base_url is not None and judge.model is None:
            yield Violation(f"{path}.model", "is required with baseUrl", "set it to the model's name at the endpoint")
        if judge.base_url is None and judge.model is not None:
            yield Violation(
                f"{path}.model",
                "names a model at an endpoint, but there is no baseUrl",
                "set baseUrl, or remove it; the job's own engines serve spec.judge.model",
            )
        if judge.base_url is None and judge.api_key_env is not None:
            yield Violation(f"{path}.apiKeyEnv", "is a key for baseUrl, which is not set", "remove it")


@rule(
    cel=Cel(
        SPEC,
        "has(self.judge) == self.reward.functions.exists(f, has(f.judge) && !has(f.judge.baseUrl))",
        "is required by judges in reward.functions without baseUrl, and only by them; set its model, or a baseUrl "
        "for each",
        ".judge",
    )
)
def judges_without_an_endpoint_have_a_pool(job: Job) -> Iterator[Violation]:
    own = [path for path, judge in _judges(job) if judge.base_url is None]
    if own and job.spec.judge is None:
        yield Violation(
            "spec.judge",
            f"is required by {own[0]}, which has no baseUrl",
            "set its model (spec.judge.model.source), or the baseUrl and model of an endpoint",
        )
    if not own and job.spec.judge is not None:
        yield Violation(
            "spec.judge",
            "no judge in reward.functions uses it",
            "remove it, or remove a judge's baseUrl and model",
        )


@rule(
    cel=Cel(
        SPEC,
        "!has(self.judge) || !has(self.judge.maxContextTokens) || self.reward.functions.all(f, !has(f.judge) || "
        "has(f.judge.baseUrl) || f.judge.maxTokens < self.judge.maxContextTokens)",
        "must be more than maxTokens of each of its judges, or no question fits; raise it, or lower maxTokens",
        ".judge.maxContextTokens",
    )
)
def answers_of_judges_fit_their_context(job: Job) -> Iterator[Violation]:
    pool = job.spec.judge
    if pool is None or pool.max_context_tokens is None:
        return
    for path, judge in _judges(job):
        if judge.base_url is None and judge.max_tokens >= pool.max_context_tokens:
            yield Violation(
                "spec.judge.maxContextTokens",
                f"{pool.max_context_tokens} leaves no room for a question, with {path}.maxTokens = {judge.max_tokens}",
                "raise it, or lower maxTokens",
            )
            return


@rule(not_in_cel="the content of params is hidden from CEL")
def judges_have_no_params(job: Job) -> Iterator[Violation]:
    for index, function in enumerate(job.spec.reward.functions):
        if function.type == "judge" and function.params:
            yield Violation(
                f"spec.reward.functions[{index}].params",
                "does not apply to type judge",
                "put its settings below judge",
            )


@rule(not_in_cel="the API server would estimate the search of a text as long as a template as too dear")
def templates_of_judges_name_the_response(job: Job) -> Iterator[Violation]:
    for path, judge in _judges(job):
        named = set(_IN_BRACES.findall(judge.template))
        for unknown in sorted(named - set(PLACEHOLDERS)):
            close = did_you_mean(unknown, PLACEHOLDERS)
            yield Violation(
                f"{path}.template",
                f"there is no {{{unknown}}}",
                f"did you mean {close}?" if close else "the placeholders are {prompt}, {response} and {answer}",
            )
        if "response" not in named:
            yield Violation(
                f"{path}.template", "does not contain {response}, which the judge is to score", "add {response}"
            )


@rule(not_in_cel="the API server would estimate the search of a text as long as a template as too dear")
def answers_are_there_for_judges_that_compare(job: Job) -> Iterator[Violation]:
    data = job.spec.data
    if data.answer is not None or all(part.task is not None or part.answer is not None for _, part in job.train_parts):
        return
    for path, judge in _judges(job):
        if "{answer}" in judge.template:
            yield Violation(
                f"{path}.template",
                "contains {answer}, but the job has no reference answer",
                "set spec.data.answer to its column, or remove {answer}",
            )


@rule(
    cel=[
        Cel(
            _PARSER,
            "has(self.pattern) == (self.type == 'pattern')",
            "is required by type pattern, and only there; write a regular expression with one group",
            ".pattern",
        ),
        Cel(
            _PARSER,
            "has(self.field) == (self.type == 'json')",
            "is required by type json, and only there; write the name of the field with the score",
            ".field",
        ),
        Cel(
            _PARSER,
            "self.type == 'label' ? has(self.labels) && size(self.labels) > 0 : "
            "self.type != 'number' || !has(self.labels) || size(self.labels) == 0",
            "are required by type label, and do not apply to type number",
            ".labels",
        ),
        Cel(_PARSER, "self.low < self.high", "must be below high; lower it", ".low"),
    ]
)
def parsers_of_judges_have_what_they_need(job: Job) -> Iterator[Violation]:
    for judge_path, judge in _judges(job):
        parser, path = judge.parser, f"{judge_path}.parser"
        for name, value, kind in (("pattern", parser.pattern, "pattern"), ("field", parser.field, "json")):
            if parser.type == kind and value is None:
                yield Violation(f"{path}.{name}", f"is required by type {kind}", "add it")
            if parser.type != kind and value is not None:
                yield Violation(
                    f"{path}.{name}", f"does not apply to type {parser.type}", f"remove it, or use type: {kind}"
                )
        if parser.type == "label" and not parser.labels:
            yield Violation(
                f"{path}.labels", "are required by type label", "add some, for example [{label: good, score: 1}]"
            )
        if parser.type == "number" and parser.labels:
            yield Violation(f"{path}.labels", "do not apply to type number", "remove them, or use type: label")
        if parser.low >= parser.high:
            yield Violation(
                f"{path}.low", f"{parser.low:g} is not below high = {parser.high:g}", "lower it, or raise high"
            )


@rule(not_in_cel="labels are compared without regard to capitals, by Python's rules")
def labels_of_judges_differ(job: Job) -> Iterator[Violation]:
    for path, judge in _judges(job):
        seen: set[str] = set()
        for index, label in enumerate(judge.parser.labels):
            said = plain_label(label.label)
            if not said or said in seen:
                problem = "is listed twice" if said else "contains no words"
                yield Violation(f"{path}.parser.labels[{index}].label", f'"{label.label}" {problem}', "change it")
            seen.add(said)


@rule(not_in_cel="the groups of a regular expression are counted by Python's compiler")
def patterns_of_judges_have_one_group(job: Job) -> Iterator[Violation]:
    for path, judge in _judges(job):
        if judge.parser.pattern is None:
            continue
        where = f"{path}.parser.pattern"
        try:
            groups = re.compile(judge.parser.pattern).groups
        except (re.error, OverflowError, RecursionError) as problem:
            yield Violation(where, f"is not a regular expression: {problem}", "fix it (Python syntax)")
            continue
        if groups != 1:
            yield Violation(
                where, f"has {groups} groups", "write exactly one, around the score, and any others as (?:...)"
            )


@rule(
    cel=Cel(
        SPEC,
        "self.reward.functions.all(f, !has(f.judge) || f.judge.deadlineSeconds <= self.deadlines.progressSeconds)",
        "a judge's deadlineSeconds is more than deadlines.progressSeconds, which ends the run first; lower it",
        ".reward.functions",
    )
)
def judges_end_before_the_run_does(job: Job) -> Iterator[Violation]:
    longest = job.spec.deadlines.progress_seconds
    for path, judge in _judges(job):
        if judge.deadline_seconds > longest:
            yield Violation(
                f"{path}.deadlineSeconds",
                f"{judge.deadline_seconds} is more than deadlines.progressSeconds = {longest}, which would end the "
                "run first",
                "lower it, or raise progressSeconds",
            )
