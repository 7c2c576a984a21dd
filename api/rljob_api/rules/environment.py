"""Rules about spec.rollout.environment."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api.rules.cel import HAS_NO_TEMPLATE, SPEC, Cel, text
from rljob_api.rules.registry import Job, rule
from rljob_api.schema import find
from rljob_api.violations import Violation

_PATH = "spec.rollout.environment"
_ENVIRONMENT = ("spec", "rollout", "environment")
_TOOL = (*_ENVIRONMENT, "tools", "[]")
_PROGRAMS = ("tools", "custom")
_BELONG_TO = {
    "callFormat": ("tools",),
    "maxTurns": _PROGRAMS,
    "maxTurnTokens": _PROGRAMS,
    "maxObservationTokens": ("tools",),
    "maxCalls": ("tools",),
    "maxCallsPerTurn": ("tools",),
    "callSeconds": ("tools",),
}
"""Fields, and the types of environments that they are for."""


def _says_nothing(field: str) -> str:
    """Whether a field is not there, or says what its absence means: a resolved job says everything."""
    node = find([*_ENVIRONMENT, field])
    assert node is not None
    if node.fallback is None:
        return f"!has(self.{field})"
    same = text(node.fallback) if isinstance(node.fallback, str) else str(node.fallback)
    return f"!has(self.{field}) || self.{field} == {same}"


@rule(
    cel=[
        Cel(
            _ENVIRONMENT,
            " || ".join([_says_nothing(field), *(f"self.type == '{name}'" for name in types)]),
            f"is for {' and '.join(types)}; remove it, or choose another type",
            f".{field}",
        )
        for field, types in _BELONG_TO.items()
    ]
)
def environment_fields_belong_to_its_type(job: Job) -> Iterator[Violation]:
    environment = job.spec.rollout.environment
    fallbacks = environment.fallbacks()
    given = {
        "callFormat": environment.call_format not in (None, fallbacks["call_format"]),
        "maxTurns": environment.max_turns not in (None, fallbacks["max_turns"]),
        "maxTurnTokens": environment.max_turn_tokens is not None,
        "maxObservationTokens": environment.max_observation_tokens is not None,
        "maxCalls": environment.max_calls is not None,
        "maxCallsPerTurn": environment.max_calls_per_turn not in (None, fallbacks["max_calls_per_turn"]),
        "callSeconds": environment.call_seconds not in (None, fallbacks["call_seconds"]),
    }
    for field, types in _BELONG_TO.items():
        if given[field] and environment.type not in types:
            yield Violation(
                f"{_PATH}.{field}",
                f"has no meaning for type {environment.type}",
                f"remove it, or use type: {' or '.join(types)}",
            )


@rule(not_in_cel="CEL sees nothing of params, which may hold anything")
def params_are_a_programs(job: Job) -> Iterator[Violation]:
    environment = job.spec.rollout.environment
    if environment.params and environment.type != "custom":
        yield Violation(
            f"{_PATH}.params", f"has no meaning for type {environment.type}", "remove it, or use type: custom"
        )


@rule(
    cel=Cel(
        _ENVIRONMENT,
        # `function` is a reserved word of CEL; Kubernetes escapes it.
        "(self.type == 'custom') == has(self.__function__)",
        "belongs to type custom, which needs it; write module:function",
        ".function",
    )
)
def custom_environments_name_a_function(job: Job) -> Iterator[Violation]:
    environment = job.spec.rollout.environment
    if environment.type == "custom" and environment.function is None:
        yield Violation(
            f"{_PATH}.function", "is required by type custom", "write module:function, for example my_env:episode"
        )
    if environment.type != "custom" and environment.function is not None:
        yield Violation(
            f"{_PATH}.function", f"has no meaning for type {environment.type}", "remove it, or use type: custom"
        )


@rule(
    cel=Cel(
        _ENVIRONMENT,
        "(self.type == 'tools') == (has(self.tools) && self.tools.size() > 0)",
        "belong to type tools, which needs one at least",
        ".tools",
    )
)
def tool_environments_have_tools(job: Job) -> Iterator[Violation]:
    environment = job.spec.rollout.environment
    if environment.type == "tools" and not environment.tools:
        yield Violation(f"{_PATH}.tools", "are required by type tools", "list one at least, e.g. {type: calculator}")
    if environment.type != "tools" and environment.tools:
        yield Violation(f"{_PATH}.tools", f"have no meaning for type {environment.type}", "remove them")


@rule(
    cel=Cel(
        _TOOL,
        "(self.type == 'custom') == has(self.__function__)",
        "belongs to type custom, which needs it; write module:function",
        ".function",
    )
)
def custom_tools_name_a_function(job: Job) -> Iterator[Violation]:
    for index, tool in enumerate(job.spec.rollout.environment.tools):
        path = f"{_PATH}.tools[{index}].function"
        if tool.type == "custom" and tool.function is None:
            yield Violation(path, "is required by type custom", "write module:function, for example my_tools:search")
        if tool.type != "custom" and tool.function is not None:
            yield Violation(path, f"has no meaning for type {tool.type}", "remove it, or use type: custom")


@rule(
    cel=Cel(
        _TOOL,
        "!has(self.concurrency) || self.type == 'custom'",
        "is for type custom; of python, sandbox.workers run at once",
        ".concurrency",
    )
)
def concurrency_is_of_custom_tools(job: Job) -> Iterator[Violation]:
    for index, tool in enumerate(job.spec.rollout.environment.tools):
        if tool.concurrency is not None and tool.type != "custom":
            remedy = "set sandbox.workers" if tool.type == "python" else "remove it"
            yield Violation(f"{_PATH}.tools[{index}].concurrency", f"has no meaning for type {tool.type}", remedy)


@rule(
    cel=[
        Cel(
            _ENVIRONMENT,
            "!has(self.callFormat) || self.callFormat != 'codeFence' || !has(self.tools) || self.tools.size() == 1",
            "codeFence names no tool; list one, or choose another callFormat",
            ".tools",
        ),
    ]
)
def a_code_fence_calls_the_one_tool(job: Job) -> Iterator[Violation]:
    environment = job.spec.rollout.environment
    if environment.call_format == "codeFence" and len(environment.tools) > 1:
        yield Violation(
            f"{_PATH}.tools",
            f"callFormat codeFence names no tool, and there are {len(environment.tools)}",
            "list one, or choose another callFormat",
        )


@rule(
    cel=Cel(
        _ENVIRONMENT,
        "!has(self.sandbox) || (has(self.tools) && self.tools.exists(t, t.type == 'python'))",
        "is for the tool python; remove it, or list {type: python} in tools",
        ".sandbox",
    )
)
def a_sandbox_has_programs(job: Job) -> Iterator[Violation]:
    environment = job.spec.rollout.environment
    if environment.sandbox is not None and all(tool.type != "python" for tool in environment.tools):
        yield Violation(
            f"{_PATH}.sandbox",
            "is for the tool python, and there is none",
            "remove it, or list {type: python} in tools",
        )


@rule(not_in_cel="the default names of tools are made from their functions")
def tool_names_differ(job: Job) -> Iterator[Violation]:
    names: set[str] = set()
    for index, tool in enumerate(job.spec.rollout.environment.tools):
        name = tool.label
        if name in names:
            yield Violation(
                f"{_PATH}.tools[{index}].name", f'"{name}" is the name of another tool too', "give each its own name"
            )
        names.add(name)


@rule(
    cel=Cel(
        SPEC,
        "self.rollout.environment.type == 'custom' || !self.reward.functions.exists(f, f.type == 'environment')",
        "type environment is what a program returns; set rollout.environment.type: custom, or use another reward",
        ".reward.functions",
    )
)
def environment_rewards_have_a_program(job: Job) -> Iterator[Violation]:
    if job.spec.rollout.environment.type == "custom":
        return
    for index, function in enumerate(job.spec.reward.functions):
        if function.type == "environment":
            yield Violation(
                f"spec.reward.functions[{index}].type",
                f"environment is what a program returns, and rollout.environment.type is "
                f"{job.spec.rollout.environment.type}",
                "set rollout.environment.type: custom, or use another reward",
            )


@rule(
    cel=[
        Cel(
            SPEC,
            "self.rollout.environment.type != 'tools' || self.data.chat != 'never'",
            "tools are called in chat messages; set chat: auto or always",
            ".data.chat",
        ),
        Cel(
            SPEC,
            f"self.rollout.environment.type != 'tools' || self.data.chat == 'never' || !{HAS_NO_TEMPLATE}",
            "is required: tools are called in chat messages, and a tokenizer of characters has no template",
            ".model.chatTemplate",
        ),
    ]
)
def tools_need_a_chat(job: Job) -> Iterator[Violation]:
    if job.spec.rollout.environment.type != "tools":
        return
    if job.spec.data.chat == "never":
        yield Violation("spec.data.chat", "tools are called in chat messages", "set chat: auto or always")
    elif job.has_no_template:
        yield Violation(
            "spec.model.chatTemplate",
            "is required: tools are called in chat messages, and a tokenizer of characters has no template",
            "write one",
        )
