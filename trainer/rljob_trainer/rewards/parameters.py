"""What ``params`` of a built-in reward function may hold: names as in the job file, types, defaults.

All is read from the function: its keyword-only parameters are its ``params``, in camelCase.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from rljob_api.problems import did_you_mean, shown

_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict[str, Any]: "an object"}


class ParameterError(Exception):
    """One of ``params`` cannot be used."""

    def __init__(self, name: str | None, problem: str, remedy: str) -> None:
        """``name``: the parameter with the wrong value; None: a name that does not exist."""
        super().__init__(problem)
        self.name, self.problem, self.remedy = name, problem, remedy


def keyword_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that ``params`` sets, by their names in the job file."""
    parameters = inspect.signature(function).parameters.values()
    return {to_camel(p.name): p for p in parameters if p.kind is p.KEYWORD_ONLY}


def keyword_arguments(function: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """``params`` as keyword arguments of the function. Raises ``ParameterError``."""
    known, types = keyword_parameters(function), get_type_hints(function)
    arguments = {}
    for name, value in params.items():
        if name not in known:
            close = did_you_mean(name, known)
            remedy = f"did you mean {close}?" if close else f"its parameters are {', '.join(known) or 'none'}"
            raise ParameterError(None, f"there is no parameter {name!r}", remedy)
        expected = types[known[name].name]
        try:
            arguments[known[name].name] = TypeAdapter(expected).validate_python(value, strict=True)
        except ValidationError:
            actual = f"the text {shown(value)}" if isinstance(value, str) else shown(value)
            raise ParameterError(name, f"must be {_words(expected)}, not {actual}", _remedy(expected, value)) from None
    return arguments


def described(function: Callable[..., Any], leave_out: tuple[str, ...] = ()) -> str:
    """The parameters with their defaults, on one line: ``method strict (or flexible), formatScore 0.0``."""
    types = get_type_hints(function)
    said = []
    for name, parameter in keyword_parameters(function).items():
        if name in leave_out:
            continue
        default = parameter.default if isinstance(parameter.default, str) else json.dumps(parameter.default)
        others = [choice for choice in _choices(types[parameter.name]) if choice != parameter.default]
        alternatives = f" (or {', '.join(others)})" if others else ""
        said.append(f"{name} {default}{alternatives}")
    return ", ".join(said) or "none"


def prose(function: Callable[..., Any]) -> str:
    """What the function's docstring says, in the words of the job file."""
    names = {parameter.name: name for name, parameter in keyword_parameters(function).items()}
    text = " ".join((inspect.getdoc(function) or "").split())
    return re.sub("``(.+?)``", lambda quoted: f"`{names.get(quoted[1], quoted[1])}`", text)


def _choices(annotation: Any) -> tuple[str, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _words(annotation: Any) -> str:
    choices = _choices(annotation)
    return f"one of {', '.join(choices)}" if choices else _EXPECTED[annotation]


def _remedy(annotation: Any, value: Any) -> str:
    if choices := _choices(annotation):
        close = did_you_mean(str(value), choices)
        return f"did you mean {close}?" if close else "use one of them"
    if annotation is str:
        return "put it in quotes"
    return f"write {_EXPECTED[annotation]}{', without quotes' if isinstance(value, str) else ''}"
