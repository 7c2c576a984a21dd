"""The body of ``POST /v1/chat/completions``: what of OpenAI's API a model can do here, and nothing else in silence.

A field that would change the answer and cannot is refused by its name, with status 400. Fields that change no answer
(``user``, ``metadata`` ...) are taken. The sampling is the job's: what is trained on has to be drawn as the job says,
in training and in validation, whatever a client's ``temperature``, ``top_p`` and ``stop`` ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rljob_trainer.endpoint.refusals import RefusedError, invalid, unsupported
from rljob_trainer.episodes.requests import SamplingSettings

_NO_EFFECT = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user"}
)
"""Fields that change nothing of an answer."""
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": [1],
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "logit_bias": [{}],
    "response_format": [{"type": "text"}],
    "top_logprobs": [0],
    "parallel_tool_calls": [True],
    "store": [False],
    "modalities": [["text"]],
}
"""Fields that may be there as long as they ask for what happens without them."""
_REFUSED = frozenset(
    {"audio", "function_call", "functions", "moderation", "prediction", "prompt_cache_options", "reasoning_effort",
     "seed", "verbosity", "web_search_options"}
)  # fmt: skip
_READ = frozenset(
    {"logprobs", "max_completion_tokens", "max_tokens", "messages", "model", "stop", "stream", "stream_options",
     "temperature", "tool_choice", "tools", "top_p"}
)  # fmt: skip
_ROLES = {"system": "system", "developer": "system", "user": "user"}
"""Roles of messages that are text, and those by which chat templates know them."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request that can be answered."""

    messages: Sequence[Mapping[str, Any]]
    """For the chat template; but the answers among them are as the client has them, calls apart."""
    tools: Sequence[Mapping[str, Any]] | None
    max_tokens: int | None
    stream: bool
    include_usage: bool
    """A stream ends with the number of tokens."""
    log_probs: bool
    not_taken: Mapping[str, str]
    """Fields whose word does not count here, with what counts instead: for a note."""


def chat_request(body: Any, model: str, sampling: SamplingSettings) -> ChatRequest:
    """What a body asks for. ``model`` is the name of the one there is. Raises ``RefusedError``."""
    if not isinstance(body, dict):
        raise invalid("", "the body is not a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        _check_field(name, value)
    _check_model(given, model)
    tools = _tools(given.get("tools", []))
    choice = given.get("tool_choice", "auto")
    if choice != "auto" and not (choice == "none" and tools is None):
        raise unsupported("tool_choice", f"tool_choice {choice!r} is not supported; the model chooses (auto)")
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise unsupported("stream_options", "of stream_options, only include_usage is supported")
    if options.get("include_obfuscation"):
        raise unsupported("stream_options.include_obfuscation", "streams are not obfuscated")
    return ChatRequest(
        _messages(given.get("messages")),
        tools,
        _longest(given),
        _flag(given, "stream"),
        _flag(options, "include_usage"),
        _flag(given, "logprobs"),
        _not_taken(given, sampling),
    )


def _not_taken(given: Mapping[str, Any], sampling: SamplingSettings) -> Mapping[str, str]:
    instead = {}
    for name, ours in (("temperature", sampling.temperature), ("top_p", sampling.top_p)):
        value = given.get(name, ours)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise invalid(name, f"{name} must be a number, not {value!r}")
        if value != ours:
            instead[name] = f"{name} {str(value)[:20]}, but answers are sampled with the job's {ours:g}"
    if stop := given.get("stop"):
        if not all(isinstance(text, str) for text in (stop if isinstance(stop, list) else [stop])):
            raise invalid("stop", "stop must be a string or a list of strings")
        instead["stop"] = f"stop {str(stop)[:80]}, but answers continue until the model ends them"
    return instead


def _check_field(name: str, value: Any) -> None:
    if name in _NEUTRAL:
        if not any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL[name]) and not (
            value == 0 and 0 in _NEUTRAL[name]
        ):
            raise unsupported(name, f"{name}: {value!r} is not supported; remove it")
    elif name in _REFUSED:
        raise unsupported(name, f"{name} is not supported; remove it")
    elif name not in _READ and name not in _NO_EFFECT:
        raise RefusedError(f"unknown parameter: {name}", param=name, code="unknown_parameter")


def _check_model(given: Mapping[str, Any], model: str) -> None:
    if given.get("model") != model:
        raise RefusedError(
            f"the model {given.get('model')!r} does not exist here; the model in training is called {model!r} "
            "(environment variable OPENAI_MODEL)",
            status=404,
            param="model",
            code="model_not_found",
        )


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise invalid(name, f"{name} must be true or false, not {value!r}")
    return value


def _longest(given: Mapping[str, Any]) -> int | None:
    """The fewer of the two names' tokens: the older one of them is still used."""
    longest = None
    for name in ("max_tokens", "max_completion_tokens"):
        if name not in given:
            continue
        value = given[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise invalid(name, f"{name} must be an integer of at least 1, not {value!r}")
        longest = value if longest is None else min(longest, value)
    return longest


def _tools(given: Any) -> Sequence[Mapping[str, Any]] | None:
    if not isinstance(given, list):
        raise invalid("tools", "tools is not a list")
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise unsupported(f"{where}.type", "of tools, only functions are supported")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{where}.function", "a function needs a name and may have a description and parameters")
        if function.get("strict"):
            raise unsupported(
                f"{where}.function.strict", "the model's calls are not constrained to their schema; handle invalid ones"
            )
    return [
        {
            "type": "function",
            "function": {
                name: value for name, value in tool["function"].items() if name != "strict" and value is not None
            },
        }
        for tool in given
    ] or None


def _messages(given: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(given, list) or not given:
        raise invalid("messages", "messages must be a list of at least one")
    messages: list[Mapping[str, Any]] = []
    called: dict[str, str] = {}
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise invalid(where, f"{where} is not an object")
        role = message.get("role")
        read = _READERS.get(role) if isinstance(role, str) else None
        if read is None:
            raise unsupported(f"{where}.role", f"the role {role!r} is not supported; use {', '.join(_READERS)}")
        messages.append(read({k: v for k, v in message.items() if v is not None}, where, called))
    return messages


def _said(message: Mapping[str, Any], where: str, called: dict[str, str]) -> dict[str, Any]:
    _only(message, {"role", "content"}, where)
    return {"role": _ROLES[message["role"]], "content": _text(message.get("content"), where)}


def _answer(message: Mapping[str, Any], where: str, called: dict[str, str]) -> dict[str, Any]:
    _only(message, {"role", "content", "tool_calls"}, where)
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls", "tool_calls is not a list")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(call.get("id"), str)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments"), str)
        ):
            raise invalid(f"{where}.tool_calls[{index}]", "a call needs an id and a function with a name and arguments")
        called[call["id"]] = function["name"]
    content = _text(message["content"], where) if "content" in message else None
    if content is None and not calls:
        raise invalid(f"{where}.content", "an answer needs content or tool_calls")
    kept = [{"id": c["id"], "function": {k: c["function"][k] for k in ("name", "arguments")}} for c in calls]
    return {"role": "assistant", "content": content, **({"tool_calls": kept} if kept else {})}


def _observation(message: Mapping[str, Any], where: str, called: dict[str, str]) -> dict[str, Any]:
    _only(message, {"role", "content", "tool_call_id", "name"}, where)
    id = message.get("tool_call_id")
    if not isinstance(id, str):
        raise invalid(f"{where}.tool_call_id", "a tool message needs the id of its call")
    name = message.get("name", called.get(id))
    told = {"role": "tool", "content": _text(message.get("content"), where), "tool_call_id": id}
    return told if name is None else {**told, "name": name}


_READERS: Mapping[str, Callable[[Mapping[str, Any], str, dict[str, str]], dict[str, Any]]] = {
    **dict.fromkeys(_ROLES, _said),
    "assistant": _answer,
    "tool": _observation,
}


def _only(message: Mapping[str, Any], fields: set[str], where: str) -> None:
    for name in message:
        if name not in fields and not (name in ("annotations", "refusal") and not message[name]):
            raise unsupported(f"{where}.{name}", f"{name} is not supported in a message of the role {message['role']}")


def _text(content: Any, where: str) -> str:
    """A message's text, whose parts are put together."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where}.content", "content is neither text nor a list of parts")
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise unsupported(f"{where}.content[{index}]", "only text parts are supported")
    return "".join(part["text"] for part in content)
