"""Calls of tools as published models write them, and what is made of broken ones."""

from __future__ import annotations

import pytest

from rljob_trainer.environments.call_formats import FORMATS, MalformedCall, ToolCall, without_thoughts

SEARCH = ToolCall("search", {"query": "Paris", "most": 3})
ADD = ToolCall("add", {"a": 1})


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", "Let me look.", []),
        (
            "hermes",
            'I ask.\n<tool_call>\n{"name": "search", "arguments": {"query": "Paris", "most": 3}}\n</tool_call>\n'
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [SEARCH, ADD],
        ),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> and {"name": "x"}', [ADD]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ("codeFence", "No code.", []),
        ("codeFence", "So:\n```python\nprint(1)\n```\nand\n```py\nprint(2)\n```", [ToolCall(None, "print(2)\n")]),
        ("codeFence", "```json\n{}\n```", []),
        ("llama", '{"name": "search", "parameters": {"query": "Paris", "most": 3}}', [SEARCH]),
        (
            "llama",
            '<|python_tag|>{"name": "search", "parameters": {"query": "Paris", "most": 3}}; '
            '{"name": "add", "parameters": {"a": 1}}',
            [SEARCH, ADD],
        ),
        ("llama", 'The result is {"name": "x"}.', []),
        ("pythonic", '[search(query="Paris", most=3), add(a=1)]', [SEARCH, ADD]),
        ("pythonic", "[1, 2]", []),
        ("pythonic", "[maths.add(a=(1, {2: 3}))]", [ToolCall("maths.add", {"a": [1, {"2": 3}]})]),
        ("pythonic", "I think so.", []),
    ],
)
def test_calls_are_found_in_order(name: str, text: str, calls: list[ToolCall]) -> None:
    assert FORMATS[name](text) == calls


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("It is 42.", "It is 42."),
        ("<think>Shall I call?</think>No.", "No."),
        # Where the template has opened the thinking itself.
        ("Shall I call?\n</think>\n\nNo.", "\n\nNo."),
        ("<think>one</think>two<think>three</think>four", "four"),
        ("\n<think>without an end", ""),
        ("It is called <think>.", "It is called <think>."),
        ("</think>", ""),
    ],
)
def test_what_stands_behind_a_model_s_thinking_is_said(text: str, said: str) -> None:
    assert without_thoughts(text) == said


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "add"', "not closed"),
        ("hermes", "<tool_call>add(1)</tool_call>", "not JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", 'not an object with "name"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', '"arguments" is not an object'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{"}</tool_call>', '"arguments" is not JSON'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ("codeFence", "```python\nprint(1)", "not closed"),
        ("llama", '{"name": "add", "parameters": {', "not JSON"),
        ("llama", '{"say": 1}', 'not an object with "name"'),
        ("pythonic", "[add(1)]", "no call with named arguments"),
        ("pythonic", "[add(a=open('x'))]", "not plain values"),
        ("pythonic", "[add(a=b'x')]", "not plain values"),
        ("pythonic", "[add(a=1]", "not a list of Python calls"),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": ' + '{"a": ' * 200 + "1" + "}" * 201 + "</tool_call>",
            "nested",
        ),
        ("llama", '{"name": "a", "parameters": ' + '{"a": ' * 20_000, "not JSON"),
        ("llama", '{"name": "a", "parameters": ' + '{"a": ' * 200 + "1" + "}" * 201, "nested more than 100"),
        ("pythonic", "[add(a=" + "1 + " * 900 + "1)]", "not plain values"),
        ("pythonic", "[add(a=" + "-" * 500 + "1)]", "not plain values"),
        ("pythonic", "[add(a=0x" + "f" * 6000 + ")]", "not plain values"),
        ("pythonic", "[add" + "()" * 900 + "(a=1)]", "no call with named arguments"),
        ("pythonic", "[add" + "[0]" * 150 + "(a=1)]", "no call with named arguments"),
        ("pythonic", "[add(**{'a': 1})]", "no call with named arguments"),
    ],
)
def test_a_broken_call_says_what_is_wrong(name: str, text: str, problem: str) -> None:
    (found,) = FORMATS[name](text)
    assert isinstance(found, MalformedCall)
    assert problem in found.problem


def test_of_two_calls_the_broken_one_does_not_hide_the_other() -> None:
    calls = FORMATS["hermes"]('<tool_call>x<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    assert isinstance(calls[0], MalformedCall)
    assert calls[1] == ADD
