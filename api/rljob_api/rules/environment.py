"""Rules about spec.rollout.environment."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.alias_generators import to_camel

from rljob_api.rules.cel import HAS_NO_TEMPLATE, REWARD, SPEC, Cel, text
from rljob_api.rules.registry import Job, rule
from rljob_api.schema import find
from rljob_api.spec.environment import SandboxSpec
from rljob_api.violations import Violation

_PATH = "spec.rollout.environment"
_ENVIRONMENT = ("spec", "rollout", "environment")
_TOOL = (*_ENVIRONMENT, "tools", "[]")
_PROGRAMS = ("tools", "custom", "agent")
_OWN = ("custom", "agent")
"""Types of which the user writes the program."""
_BELONG_TO = {
    "callFormat": ("tools", "agent"),
    "maxTurns": _PROGRAMS,
    "maxTurnTokens": _PROGRAMS,
    "maxObservationTokens": ("tools",),
    "maxCalls": ("tools",),
    "maxCallsPerTurn": ("tools",),
    "callSeconds": ("tools",),
    "agents": ("agent",),
    "agentSeconds": ("agent",),
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
            f"applies only to {', '.join(types)}; remove it, or choose another type",
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
        "agents": environment.agents not in (None, fallbacks["agents"]),
        "agentSeconds": environment.agent_seconds not in (None, fallbacks["agent_seconds"]),
    }
    for field, types in _BELONG_TO.items():
        if given[field] and environment.type not in types:
            yield Violation(
                f"{_PATH}.{field}",
                f"does not apply to type {environment.type}",
                f"remove it, or use type: {' or '.join(types)}",
            )


@rule(not_in_cel="CEL sees nothing of params, which may hold anything")
def params_are_a_programs(job: Job) -> Iterator[Violation]:
    environment = job.spec.rollout.environment
    if environment.params and environment.type not in _OWN:
        yield Violation(
            f"{_PATH}.params",
            f"does not apply to type {environment.type}",
            f"remove it, or use type: {' or '.join(_OWN)}",
        )


@rule(
    cel=Cel(
        _ENVIRONMENT,
        # `function` is a reserved word of CEL; Kubernetes escapes it.
        "self.type == 'agent' || (self.type == 'custom') == has(self.__function__)",
        "is required by type custom, and only there; write module:function",
        ".function",
    )
)
def custom_environments_name_a_function(job: Job) -> Iterator[Violation]:
    environment = job.spec.rollout.environment
    if environment.type == "custom" and environment.function is None:
        yield Violation(
            f"{_PATH}.function", "is required by type custom", "write module:function, for example my_env:episode"
        )
    if environment.type not in _OWN and environment.function is not None:
        yield Violation(
            f"{_PATH}.function",
            f"does not apply to type {environment.type}",
            f"remove it, or use type: {' or '.join(_OWN)}",
        )


_HAS_COMMAND = "(has(self.command) && self.command.size() > 0)"


@rule(
    cel=[
        Cel(
            _ENVIRONMENT,
            f"self.type == 'agent' || !{_HAS_COMMAND}",
            "applies only to type agent; remove it, or use that type",
            ".command",
        ),
        Cel(
            _ENVIRONMENT,
            f"self.type != 'agent' || has(self.__function__) || {_HAS_COMMAND}",
            "is required by type agent without function; write a program and its arguments, or set function",
            ".command",
        ),
        Cel(
            _ENVIRONMENT,
            f"self.type != 'agent' || !has(self.__function__) || !{_HAS_COMMAND}",
            "cannot be combined with function; remove one of them",
            ".command",
        ),
    ]
)
def agents_are_a_command_or_a_function(job: Job) -> Iterator[Violation]:
    environment = job.spec.rollout.environment
    path = f"{_PATH}.command"
    if environment.type != "agent":
        if environment.command:
            yield Violation(path, f"does not apply to type {environment.type}", "remove it, or use type: agent")
    elif not environment.command and environment.function is None:
        yield Violation(
            path,
            "is required by type agent without function",
            "write a program and its arguments, for example [python, my_agent.py], or function: my_agent:run",
        )
    elif environment.command and environment.function is not None:
        yield Violation(path, "cannot be combined with function", "remove one of them")


@rule(
    cel=Cel(
        _ENVIRONMENT,
        "self.type != 'agent' || !has(self.callFormat) || self.callFormat != 'codeFence'",
        "codeFence calls carry no tool name, but an agent's calls need one; choose another",
        ".callFormat",
    )
)
def calls_of_agents_have_names(job: Job) -> Iterator[Violation]:
    environment = job.spec.rollout.environment
    if environment.type == "agent" and environment.call_format == "codeFence":
        yield Violation(
            f"{_PATH}.callFormat",
            "codeFence calls carry no tool name, but an agent's calls need one",
            "use hermes, llama or pythonic",
        )


@rule(
    cel=Cel(
        _ENVIRONMENT,
        "(self.type == 'tools') == (has(self.tools) && self.tools.size() > 0)",
        "require type tools, which needs at least one",
        ".tools",
    )
)
def tool_environments_have_tools(job: Job) -> Iterator[Violation]:
    environment = job.spec.rollout.environment
    if environment.type == "tools" and not environment.tools:
        yield Violation(f"{_PATH}.tools", "are required by type tools", "list at least one, e.g. {type: calculator}")
    if environment.type != "tools" and environment.tools:
        yield Violation(f"{_PATH}.tools", f"do not apply to type {environment.type}", "remove them")


@rule(
    cel=Cel(
        _TOOL,
        "(self.type == 'custom') == has(self.__function__)",
        "is required by type custom, and only there; write module:function",
        ".function",
    )
)
def custom_tools_name_a_function(job: Job) -> Iterator[Violation]:
    for index, tool in enumerate(job.spec.rollout.environment.tools):
        path = f"{_PATH}.tools[{index}].function"
        if tool.type == "custom" and tool.function is None:
            yield Violation(path, "is required by type custom", "write module:function, for example my_tools:search")
        if tool.type != "custom" and tool.function is not None:
            yield Violation(path, f"does not apply to type {tool.type}", "remove it, or use type: custom")


@rule(
    cel=Cel(
        _TOOL,
        "(self.type == 'search') == has(self.corpus)",
        "is required by type search, and only there; write {source: FILE}",
        ".corpus",
    )
)
def search_tools_have_a_corpus(job: Job) -> Iterator[Violation]:
    for index, tool in enumerate(job.spec.rollout.environment.tools):
        path = f"{_PATH}.tools[{index}].corpus"
        if tool.type == "search" and tool.corpus is None:
            yield Violation(path, "is required by type search", "write {source: FILE}, with a passage in each row")
        if tool.type != "search" and tool.corpus is not None:
            yield Violation(path, f"does not apply to type {tool.type}", "remove it, or use type: search")


@rule(
    cel=Cel(
        _TOOL,
        "!has(self.concurrency) || self.type == 'custom'",
        "applies only to type custom; for python, set sandbox.workers",
        ".concurrency",
    )
)
def concurrency_is_of_custom_tools(job: Job) -> Iterator[Violation]:
    for index, tool in enumerate(job.spec.rollout.environment.tools):
        if tool.concurrency is not None and tool.type != "custom":
            remedy = "set sandbox.workers" if tool.type == "python" else "remove it"
            yield Violation(f"{_PATH}.tools[{index}].concurrency", f"does not apply to type {tool.type}", remedy)


@rule(
    cel=[
        Cel(
            _ENVIRONMENT,
            "!has(self.callFormat) || self.callFormat != 'codeFence' || !has(self.tools) || self.tools.size() == 1",
            "codeFence carries no tool name; list one tool, or choose another callFormat",
            ".tools",
        ),
    ]
)
def a_code_fence_calls_the_one_tool(job: Job) -> Iterator[Violation]:
    environment = job.spec.rollout.environment
    if environment.call_format == "codeFence" and len(environment.tools) > 1:
        yield Violation(
            f"{_PATH}.tools",
            f"callFormat codeFence carries no tool name, but there are {len(environment.tools)} tools",
            "list one tool, or choose another callFormat",
        )


@rule(
    cel=Cel(
        _ENVIRONMENT,
        "!has(self.sandbox) || (has(self.tools) && self.tools.exists(t, t.type == 'python'))",
        "is only for the tool python; remove it, or list {type: python} in tools",
        ".sandbox",
    )
)
def a_sandbox_has_programs(job: Job) -> Iterator[Violation]:
    environment = job.spec.rollout.environment
    if environment.sandbox is not None and all(tool.type != "python" for tool in environment.tools):
        yield Violation(
            f"{_PATH}.sandbox",
            "is only for the tool python, which is not listed",
            "remove it, or list {type: python} in tools",
        )


_SANDBOXES = ((*_ENVIRONMENT, "sandbox"), (*REWARD, "sandbox"))
_MOST_WORKERS = 32
"""Of a sandbox beside the driver."""


def _sandboxes(job: Job) -> Iterator[tuple[str, SandboxSpec]]:
    for path, sandbox in ((_PATH, job.spec.rollout.environment.sandbox), ("spec.reward", job.spec.reward.sandbox)):
        if sandbox is not None:
            yield f"{path}.sandbox", sandbox


def _changed(sandbox: SandboxSpec, *fields: str) -> list[str]:
    """Those of some fields that say something else than their absence does."""
    return [field for field in fields if getattr(sandbox, field) != type(sandbox).model_fields[field].default]


@rule(
    cel=[
        Cel(
            path,
            "!has(self.url) || (self.isolation == 'auto' && self.processes == 32)",
            "is a service, which sets its own isolation and processes; remove those, or url",
            ".url",
        )
        for path in _SANDBOXES
    ]
)
def a_service_contains_programs_itself(job: Job) -> Iterator[Violation]:
    for path, sandbox in _sandboxes(job):
        if sandbox.url is not None and (given := _changed(sandbox, "isolation", "processes")):
            names = ", ".join(map(to_camel, given))
            yield Violation(
                f"{path}.url", f"is a service, which sets its own {names}", f"remove {names}, or remove url"
            )


@rule(
    cel=[
        Cel(
            path,
            f"has(self.url) || self.deadlineSeconds == 600 && (!has(self.workers) || self.workers <= {_MOST_WORKERS})",
            f"without url there are at most {_MOST_WORKERS} workers and no deadlineSeconds; set url, or use fewer "
            "workers",
        )
        for path in _SANDBOXES
    ]
)
def a_sandbox_beside_the_driver_is_small(job: Job) -> Iterator[Violation]:
    for path, sandbox in _sandboxes(job):
        if sandbox.url is None:
            if (sandbox.workers or 0) > _MOST_WORKERS:
                yield Violation(
                    f"{path}.workers",
                    f"is {sandbox.workers}, but next to the driver {_MOST_WORKERS} is the maximum",
                    f"use {_MOST_WORKERS} or less, or the url of a service",
                )
            if _changed(sandbox, "deadline_seconds"):
                yield Violation(f"{path}.deadlineSeconds", "applies only to a service", "remove it, or set its url")


@rule(not_in_cel="the default names of tools are made from their functions")
def tool_names_differ(job: Job) -> Iterator[Violation]:
    names: set[str] = set()
    for index, tool in enumerate(job.spec.rollout.environment.tools):
        name = tool.label
        if name in names:
            yield Violation(
                f"{_PATH}.tools[{index}].name", f'"{name}" is also the name of another tool', "give each its own name"
            )
        names.add(name)


@rule(
    cel=Cel(
        SPEC,
        "self.rollout.environment.type in ['custom', 'agent'] || "
        "!self.reward.functions.exists(f, f.type == 'environment')",
        "type environment is the reward that a program returns; set rollout.environment.type: custom or agent, or "
        "use another reward",
        ".reward.functions",
    )
)
def environment_rewards_have_a_program(job: Job) -> Iterator[Violation]:
    if job.spec.rollout.environment.type in _OWN:
        return
    for index, function in enumerate(job.spec.reward.functions):
        if function.type == "environment":
            yield Violation(
                f"spec.reward.functions[{index}].type",
                "environment is the reward that a program returns, but rollout.environment.type is "
                f"{job.spec.rollout.environment.type}",
                "set rollout.environment.type: custom or agent, or use another reward",
            )


@rule(
    cel=[
        Cel(
            SPEC,
            "!(self.rollout.environment.type in ['tools', 'agent']) || self.data.chat != 'never'",
            "tools and agents need chat messages; set chat: auto or always",
            ".data.chat",
        ),
        Cel(
            SPEC,
            "!(self.rollout.environment.type in ['tools', 'agent']) || self.data.chat == 'never' || "
            f"!{HAS_NO_TEMPLATE}",
            "is required: tools and agents need chat messages, but a tokenizer of characters has no template",
            ".model.chatTemplate",
        ),
    ]
)
def tools_and_agents_need_a_chat(job: Job) -> Iterator[Violation]:
    if job.spec.rollout.environment.type not in ("tools", "agent"):
        return
    if job.spec.data.chat == "never":
        yield Violation("spec.data.chat", "tools and agents need chat messages", "set chat: auto or always")
    elif job.has_no_template:
        yield Violation(
            "spec.model.chatTemplate",
            "is required: tools and agents need chat messages, but a tokenizer of characters has no template",
            "write one",
        )
