"""Tools: what they are called with, what they say, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest

from rljob_trainer.environments.tools import Tool, ToolError, calculator
from rljob_trainer.errors import JobFileError


def tool(function: Callable[..., Any]) -> Tool:
    return Tool("tool", function, None, "spec.rollout.environment.tools[0]")


def search(query: str, most: int = 3, order: Literal["best", "new"] = "best") -> list[str]:
    """Finds documents.

    More is not for the model.
    """
    return [f"{query} {order}"] * most


def test_a_schema_is_what_models_are_told_of_a_function() -> None:
    assert Tool("search", search, None, "").schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds documents.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "most": {"type": "integer", "default": 3},
                    "order": {"type": "string", "enum": ["best", "new"], "default": "best"},
                },
                "required": ["query"],
            },
        },
    }
    assert Tool("x", search, "Else.", "").schema["function"]["description"] == "Else."


async def test_arguments_are_checked_and_results_are_text() -> None:
    assert await tool(search)({"query": "a", "most": "2"}) == '["a best", "a best"]'
    for given, said in [
        ({}, "query: Field required"),
        ({"query": "a", "most": "x"}, "most: Input should be a valid integer"),
        ({"query": "a", "wide": 1}, "wide: Extra inputs are not permitted"),
        ({"query": "a", "order": "worst"}, "order: Input should be 'best' or 'new'"),
    ]:
        with pytest.raises(ToolError, match=said):
            await tool(search)(given)


async def test_a_function_that_is_not_async_holds_nobody_up() -> None:
    def slow() -> str:
        time.sleep(0.2)
        return "done"

    turns = 0
    calling = asyncio.create_task(tool(slow)({}))
    while not calling.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert (calling.result(), turns > 3) == ("done", True)


@pytest.mark.parametrize("function", [lambda *numbers: 0, lambda **names: 0, lambda a, /: 0])
def test_functions_whose_parameters_have_no_names_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(JobFileError, match=r"tools\[0\]: tool takes"):
        tool(function)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3 - -4", "13"),
        ("7 / 2", "3.5"),
        ("-7 // 2", "-4"),
        ("-7 % 4", "1"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("1e3", "1000.0"),
    ],
)
async def test_the_calculator(expression: str, value: str) -> None:
    assert await calculator(expression) == value
    assert math.isclose(float(value), eval(expression))


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "x + 1", "__import__('os')", "(1).real", "'a' * 9", "9 ** 9 ** 9", "10 ** 99999", "1 / 0",
     "1e999 ** 9e9", "True + 1", "1 if 1 else 2", "(-8) ** 0.5", "[1]", "(" * 500 + "1" + ")" * 500, "1j"],
)  # fmt: skip
async def test_the_calculator_takes_arithmetic_and_nothing_else(expression: str) -> None:
    with pytest.raises(ToolError):
        await calculator(expression)


def test_parameters_that_no_schema_can_name_are_told_before_the_run() -> None:
    def of_a_type(where: asyncio.Event) -> str:
        return ""

    def of_a_function(score: Callable[[int], int]) -> str:
        return ""

    def underscored(_query: str) -> str:
        return ""

    for function in (of_a_type, of_a_function, underscored):
        with pytest.raises(JobFileError, match=r"tools\[0\]: .*"):
            tool(function)
