"""Tools that a model may call: what they are called with, and what they say."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import math
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cached_property
from typing import Any

from pydantic import ConfigDict, PydanticUserError, ValidationError, create_model

from rljob_trainer.errors import JobFileError
from rljob_trainer.texts import writable
from rljob_trainer.world.sandbox import Sandbox

_TRACEBACK_LINES = 4
_LARGEST_POWER = 10_000
"""Bits of the largest whole number that the calculator makes."""


class ToolError(Exception):
    """A call that cannot be made as the model wrote it; the model is told why."""


class Tool:
    """A function with a name, a description and a schema."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        description: str | None,
        field: str,
        *,
        own_limit: bool = False,
        concurrency: int | None = None,
        corpus: str | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """``field`` is where the job names it. ``own_limit``: it ends by itself what takes too long, not counting how
        long it waits for its turn. ``concurrency``: calls at once; None: as many as come. ``corpus``: a digest of what
        it looks in. ``settings``: what its answers depend on besides its text, in plain data. Raises ``JobFileError``
        for a function whose parameters no schema can name."""
        self.name = name
        self.corpus = corpus
        self.settings = settings or {}
        self.own_limit = own_limit
        self.turn: AbstractAsyncContextManager[object] = (
            nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        )
        """Whoever calls it holds this meanwhile."""
        self.function = function
        self._is_async = inspect.iscoroutinefunction(function)
        said = inspect.getdoc(function) or ""
        self._description = description or said.partition("\n\n")[0].replace("\n", " ")
        fields: dict[str, Any] = {}
        try:
            parameters = inspect.signature(function, eval_str=True).parameters
        except (TypeError, ValueError, NameError) as problem:
            raise JobFileError(f"{field}: the parameters of {name} cannot be read: {problem}") from problem
        for parameter in parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise JobFileError(f"{field}: {name} takes *args, **kwargs or unnamed arguments; give every one a name")
            kind = Any if parameter.annotation is parameter.empty else parameter.annotation
            fields[parameter.name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
        try:
            self._arguments = create_model(f"{name}Arguments", __config__=ConfigDict(extra="forbid"), **fields)
            self._arguments.model_json_schema()
            if hidden := fields.keys() - self._arguments.model_fields.keys():
                raise ValueError(f"{', '.join(sorted(hidden))} is private")
        except (TypeError, NameError, ValueError, PydanticUserError) as problem:
            said = str(problem).partition("\n")[0]
            raise JobFileError(f"{field}: cannot derive a schema for the parameters of {name}: {said}") from problem
        self.first = next(iter(fields), None)
        """The name of the first parameter; None: it has none."""

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates take it: in the format of OpenAI's functions."""
        parameters = _without_titles(self._arguments.model_json_schema())
        parameters.pop("additionalProperties", None)
        function = {"name": self.name, "description": self._description, "parameters": parameters}
        return {"type": "function", "function": function}

    async def __call__(self, given: Mapping[str, Any]) -> str:
        """What the tool says to arguments by their names. Raises ``ToolError`` for those that it does not take, and
        whatever the function raises."""
        try:
            arguments = self._arguments.model_validate(given)
        except ValidationError as error:
            said = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
            raise ToolError(said) from None
        values = {name: arguments.__dict__[name] for name in type(arguments).model_fields}
        said = self.function(**values) if self._is_async else await asyncio.to_thread(self._in_thread, values)
        if inspect.isawaitable(said):  # of an async function behind a decorator, or of an object's __call__, too
            said = await said
        return writable(said if isinstance(said, str) else json.dumps(said, ensure_ascii=False))

    def _in_thread(self, values: Mapping[str, Any]) -> Any:
        try:
            return self.function(**values)
        except StopIteration as error:  # no future can hold one, and who waits for it would do so for ever
            raise RuntimeError(f"{self.name} raised StopIteration") from error


class PythonPrograms:
    """The tool that runs what a model writes: a fresh program for each call."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def run(self, code: str) -> str:
        """Runs a Python program and returns what it prints."""
        try:
            result = await self._sandbox.run(code)
        except ValueError as error:  # it is too large
            raise ToolError(str(error)) from None
        if result.succeeded:
            return result.stdout
        how = f"exit code {result.exit_code}" if result.outcome == "exited" else result.outcome
        said = "\n".join(part for part in (result.stdout.rstrip(), _last_lines(result.stderr)) if part)
        raise ToolError(f"{how}\n{said}" if said else how)


def _last_lines(stderr: str) -> str:
    """What a traceback ends with: the innermost line and the exception."""
    return "\n".join(stderr.rstrip().splitlines()[-_TRACEBACK_LINES:])


_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


async def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression of numbers, + - * / // % ** and parentheses."""
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise ToolError(f"not an arithmetic expression: {error}") from None


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return value  # type: ignore[return-value]
        case ast.BinOp(left, ast.Pow(), right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATORS:
            return _checked(_OPERATORS[type(operation)](_value(left), _value(right)))
        case ast.UnaryOp(operation, operand) if type(operation) in _OPERATORS:
            return _checked(_OPERATORS[type(operation)](_value(operand)))
    raise ValueError(ast.unparse(node)[:80])


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _LARGEST_POWER:
        raise OverflowError("the result is too large")
    return _checked(base**exponent)


def _checked(value: Any) -> int | float:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("the result is no finite real number")
    if isinstance(value, int) and value.bit_length() > _LARGEST_POWER:
        raise OverflowError("the result is too large")
    number: int | float = value
    return number


def _without_titles(schema: Any) -> Any:
    """pydantic gives every field a title, which models need not read."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value)
            for key, value in schema.items()
            if not (key == "title" and isinstance(value, str))
        }
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema
