"""How models write calls of tools, and how they are read from what a model says.

A format finds every call of an answer, in order. What looks like a call and cannot be read is a ``MalformedCall``: the
model is told so, and goes on.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class ToolCall(NamedTuple):
    """A call as the model wrote it."""

    name: str | None
    """None: of the one tool there is."""
    arguments: Mapping[str, Any] | str
    """By their names; of the one tool there is, a text for its first parameter."""


class MalformedCall(NamedTuple):
    """What looks like a call and is none."""

    problem: str


Calls = list[ToolCall | MalformedCall]

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_DEEPEST = 100
"""Levels of lists and objects in a call's arguments: what is deeper, this interpreter may not be able to write."""
_FENCE = re.compile(r"```(?:python|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def without_thoughts(text: str) -> str:
    """What stands behind a model's thinking, in which a call is only thought of.

    It ends with ``</think>``, and begins with the tag or, where the template has written that, with the answer. What
    was begun and not ended is thinking to the end.
    """
    _, closed, behind = text.rpartition("</think>")
    if not closed:
        return "" if text.lstrip().startswith("<think>") else text
    return behind


def hermes(text: str) -> Calls:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen 2.5 and 3 and the Hermes models write."""
    found: Calls = []
    for block in _HERMES.finditer(text):
        if not block[2]:
            found.append(MalformedCall("<tool_call> is not closed by </tool_call>"))
        else:
            found.append(_of_json(block[1], "arguments"))
    return found


def code_fence(text: str) -> Calls:
    """The last block of ```` ```python ````, as in ReTool (arXiv 2504.11536)."""
    blocks = list(_FENCE.finditer(text))
    if not blocks:
        return []
    if not blocks[-1][0].endswith("```"):
        return [MalformedCall("the code block is not closed by ```")]
    return [ToolCall(None, blocks[-1][1])]


def llama(text: str) -> Calls:
    """``{"name": ..., "parameters": {...}}`` as the whole answer, several after one another with ``;``, as Llama 3
    writes."""
    stripped = text.strip().removeprefix("<|python_tag|>").strip()
    if not stripped.startswith("{"):
        return []
    found: Calls = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(stripped):
        try:
            value, at = decoder.raw_decode(stripped, at)
        except (ValueError, RecursionError) as error:
            found.append(MalformedCall(f"not JSON: {error}"))
            break
        found.append(_of_value(value, "parameters"))
        while at < len(stripped) and stripped[at] in "; \n\t\r":
            at += 1
    return found


def pythonic(text: str) -> Calls:
    """``[search(query="x"), add(a=1, b=2)]`` as the whole answer, as Llama 4 and others write."""
    stripped = text.strip()
    if not stripped.startswith("[") or "(" not in stripped:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that a model has made up
            tree = ast.parse(stripped, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [MalformedCall(f"not a list of Python calls: {error}")]
    if not isinstance(tree, ast.List):
        return [MalformedCall("not a list of Python calls")]
    return [_of_node(node) for node in tree.elts]


FORMATS: Mapping[str, Callable[[str], Calls]] = {
    "hermes": hermes,
    "codeFence": code_fence,
    "llama": llama,
    "pythonic": pythonic,
}


def _of_json(text: str, arguments: str) -> ToolCall | MalformedCall:
    try:
        return _of_value(json.loads(text), arguments)
    except (ValueError, RecursionError) as error:
        return MalformedCall(f"not JSON: {error}")


def _of_value(value: Any, arguments: str) -> ToolCall | MalformedCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall(f'not an object with "name" and "{arguments}"')
    given = value.get(arguments, {})
    if isinstance(given, str):  # some write them as JSON in a text
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            return MalformedCall(f'"{arguments}" is not JSON: {error}')
    if not isinstance(given, dict):
        return MalformedCall(f'"{arguments}" is not an object')
    if _too_deep(given):
        return MalformedCall(f'"{arguments}" is nested more than {_DEEPEST} levels deep')
    return ToolCall(value["name"], given)


def _of_node(node: ast.expr) -> ToolCall | MalformedCall:
    if not isinstance(node, ast.Call) or node.args or not all(keyword.arg for keyword in node.keywords):
        return MalformedCall(f"{_shown(node)} is no call with named arguments")
    try:
        name = _name_of(node.func)
        # As the record has them: a tuple is a list there, and a key a text.
        given = json.loads(json.dumps({str(k.arg): ast.literal_eval(k.value) for k in node.keywords}))
    except (ValueError, TypeError, RecursionError, MemoryError):
        return MalformedCall(f"{_shown(node)} has arguments that are not plain values")
    if name is None:
        return MalformedCall(f"{_shown(node)} is no call with named arguments")
    if _too_deep(given):
        return MalformedCall(f"{_shown(node)} has arguments that are nested more than {_DEEPEST} levels deep")
    return ToolCall(name, given)


def _name_of(node: ast.expr) -> str | None:
    """``a.b.c`` of nested attributes; None for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _shown(node: ast.expr) -> str:
    """The beginning of an expression, if it can be written at all."""
    try:
        return ast.unparse(node)[:80]
    except (ValueError, RecursionError, MemoryError):  # a huge number, a deep nest
        return "what is written"


def _too_deep(value: Any) -> bool:
    level, depth = [value], 0
    while level and depth <= _DEEPEST:
        inner = [list(item.values()) if isinstance(item, dict) else item for item in level]
        level = [child for item in inner if isinstance(item, list) for child in item]
        depth += 1
    return bool(level)
