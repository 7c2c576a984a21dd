"""Programs that a model writes, judged by tests in the sandbox: what they print, or what a function of theirs returns.

Each test is a program of its own, with limits of its own, and never sees what is expected of it: outputs are compared
here. A sandbox that fails says nothing about a program: it is asked again, and then the run ends.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rljob_trainer.environments.call_formats import without_thoughts
from rljob_trainer.errors import RewardWorkerError
from rljob_trainer.rewards.rules import RewardVerdict, rule
from rljob_trainer.world.protocol import WorldError, WorldGoneError
from rljob_trainer.world.sandbox import ProgramResult, Sandbox

OUTPUT_BYTES = 4 * 2**20
"""Of one program; a test that expects more is refused."""
DEFAULT_SECONDS = 5.0
_TRIES = 4
_FENCE = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_PRELUDE = """\
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator, random, re, string
import sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import *
"""
_BEGIN = """\
import json, os, sys
sys.setrecursionlimit(600000)
names = {"__name__": "__main__"}
exec(PRELUDE, names)
known = dict(names)
def load():
    with open("solution.py", "rb") as file:
        exec(compile(file.read(), "solution.py", "exec"), names)
"""
_PRINTING = _BEGIN + "load()\n"
_CALLED = (
    _BEGIN
    + """\
asked = json.load(sys.stdin)
answer = os.dup(1)
os.dup2(2, 1)  # what it prints is no result
load()
name = asked["function"]
own = name in names and names[name] is not known.get(name)  # the prelude has a gcd, too
function = names[name] if own else getattr(names["Solution"](), name)
said = json.dumps(function(*asked["arguments"])).encode()
while said:
    said = said[os.write(answer, said):]
"""
)


Close = Callable[[float, float], bool]


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test: what a program is given, and what it has to give."""

    stdin: str
    """The standard input; of a call its function and arguments."""
    expected: Any
    """What it prints, or what the function returns."""
    calls: bool
    slack: float = 0.0
    """What a number written with a fraction may differ by, however small it is."""


@rule("codeTests", inline=False, check_answer=lambda cell, _: read_tests(cell), sandboxed=True)
async def code_tests(
    sandbox: Sandbox,
    response: str,
    reference: Any,
    *,
    score: Literal["all", "fraction"] = "all",
    seconds: float = DEFAULT_SECONDS,
    most_tests: int = 0,
    prelude: bool = True,
    tolerance: float = 1e-6,
    prefix: str = "",
) -> RewardVerdict:
    """1 when the response's program passes all tests (``fraction``: the fraction of tests that it passes).

    The program is the last fenced block of Python after the last think tag, else all that follows it. The reference
    answer contains the tests, as an object or as JSON text: ``inputs`` and ``outputs``, with ``fn_name`` for calls of
    a function or of a method of ``Solution`` (APPS, TACO, verl's prime_code), or a list of ``input``, ``output``,
    ``testtype`` (LiveCodeBench). Each test may take ``seconds`` of wall time and of processor time. ``most_tests``: use
    only the first tests; 0: all. ``prelude``: import common modules, as these data sets expect. ``tolerance``: of
    numbers written with a fraction, relative; an ``absolute_tolerance`` beside ``inputs`` or ``input`` holds too, if it
    is the larger one. ``prefix``: code that the program continues. Raises
    ``ValueError`` for invalid tests, ``RewardWorkerError`` when the sandbox fails.
    """
    tests = await asyncio.to_thread(read_tests, reference)
    tests = tests[: most_tests or None]
    solution = prefix + program_in(response)
    passed = late = 0
    for test in tests:
        begin = f"PRELUDE = {_PRELUDE if prelude else ''!r}\n"
        source = begin + (_CALLED if test.calls else _PRINTING)
        result = await _run(sandbox, source, test.stdin, solution)
        late += result.outcome == "timed out"
        if result.succeeded and _agrees(test, result.stdout, tolerance):
            passed += 1
        elif score == "all":
            break
    correct = passed == len(tests)
    value = float(correct) if score == "all" else passed / len(tests)
    return RewardVerdict(value, None, correct, {"passed": passed / len(tests), "timed_out": late / len(tests)})


async def _run(sandbox: Sandbox, source: str, stdin: str, solution: str) -> ProgramResult:
    for attempt in range(_TRIES):
        try:
            return await sandbox.run(source, stdin, {"solution.py": solution})
        except WorldGoneError as error:
            raise RewardWorkerError(f"{error}. Try again: the run continues from its last checkpoint") from error
        except WorldError as error:
            failed = error
        if attempt + 1 < _TRIES:
            await asyncio.sleep(0.05 * 4**attempt)
    raise RewardWorkerError(
        f"the sandbox failed {_TRIES} times in a row, so the program could not be judged: {failed}. Try again: the run "
        "continues from its last checkpoint"
    )


def program_in(response: str) -> str:
    """The program that a response gives as its answer."""
    text = without_thoughts(response)
    blocks: list[str] = _FENCE.findall(text)
    return blocks[-1] if blocks else text


def read_tests(reference: Any) -> list[CodeTest]:
    """The tests in a reference answer. Raises ``ValueError`` saying what is wrong with it."""
    if isinstance(reference, str):
        try:
            reference = json.loads(reference)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"the reference answer has no valid tests: {reference[:80]!r} is not JSON ({error})"
            ) from None
    if isinstance(reference, Mapping):
        if not isinstance(reference.get("inputs"), Sequence) or not isinstance(reference.get("outputs"), Sequence):
            raise ValueError(
                f"the reference answer has no valid tests: it needs inputs and outputs, but has {list(reference)}"
            )
        inputs, outputs = reference["inputs"], reference["outputs"]
        if len(inputs) != len(outputs):
            raise ValueError(f"the reference answer has {len(inputs)} inputs and {len(outputs)} outputs")
        name, slack = reference.get("fn_name"), reference.get("absolute_tolerance") or 0.0
        pairs = [(given, wanted, name, slack) for given, wanted in zip(inputs, outputs, strict=True)]
    elif isinstance(reference, Sequence) and all(isinstance(test, Mapping) for test in reference):
        pairs = [_listed(number, test) for number, test in enumerate(reference)]
    else:
        raise ValueError(
            f"the reference answer has no valid tests: {str(reference)[:80]!r} is neither an object with inputs "
            "and outputs nor a list of objects with input and output"
        )
    if not pairs:
        raise ValueError("the reference answer has no tests")
    tests = [_test(number, *pair) for number, pair in enumerate(pairs)]
    for number, test in enumerate(tests):
        if isinstance(test.expected, str) and len(test.expected) > OUTPUT_BYTES // 4:
            raise ValueError(f"test {number} expects {len(test.expected)} characters, more than {OUTPUT_BYTES // 4}")
    return tests


def _listed(number: int, test: Mapping[str, Any]) -> tuple[Any, Any, str | None, Any]:
    """A test as LiveCodeBench writes it."""
    if "input" not in test or "output" not in test:
        raise ValueError(f"test {number} of the reference answer needs input and output, but has {list(test)}")
    told = test.get("metadata")
    name = test.get("fn_name") or (told.get("func_name") if isinstance(told, Mapping) else None)
    if test.get("testtype") == "functional" and not name:
        raise ValueError(f"test {number} of the reference answer calls a function without naming it (fn_name)")
    called = None if test.get("testtype") == "stdin" else name
    return test["input"], test["output"], called, test.get("absolute_tolerance") or 0.0


def _test(number: int, given: Any, wanted: Any, name: str | None, slack: Any) -> CodeTest:
    if isinstance(slack, bool) or not isinstance(slack, int | float) or not 0 <= slack < math.inf:
        raise ValueError(
            f"test {number} of the reference answer: absolute_tolerance is {str(slack)[:80]!r}, not a number from 0"
        )
    if not name:
        return CodeTest(_lines(number, given), _lines(number, wanted), False, slack)
    if isinstance(given, str):  # each argument's JSON on a line of its own, and so the result
        try:
            arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
        except ValueError as error:
            raise ValueError(f"test {number} of the reference answer: {given[:80]!r} is not JSON ({error})") from None
        if isinstance(wanted, str):
            try:
                wanted = json.loads(wanted)
            except ValueError as error:
                raise ValueError(
                    f"test {number} of the reference answer: {wanted[:80]!r} is not JSON ({error})"
                ) from None
        return CodeTest(json.dumps({"function": name, "arguments": arguments}), wanted, True, slack)
    if not isinstance(given, Sequence):
        raise ValueError(f"test {number} of the reference answer: {str(given)[:80]!r} is not a list of arguments")
    return CodeTest(json.dumps({"function": name, "arguments": list(given)}), wanted, True, slack)


def _lines(number: int, value: Any) -> str:
    """Text, or a list of its lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ValueError(f"test {number} of the reference answer: {str(value)[:80]!r} is not text and names no function")


def _agrees(test: CodeTest, stdout: str, tolerance: float) -> bool:
    def close(said: float, wanted: float) -> bool:
        try:
            return said == wanted or math.isclose(said, wanted, rel_tol=tolerance, abs_tol=test.slack)
        except OverflowError:  # an integer that is larger than any float
            return False

    if not test.calls:
        return _same_text(stdout, test.expected, close)
    try:
        said = json.loads(stdout)
        wrapped = isinstance(test.expected, list) and len(test.expected) == 1  # as APPS writes results
        return _same(said, test.expected, close) or (wrapped and _same(said, test.expected[0], close))
    except (ValueError, RecursionError):
        return False


def _same(said: Any, wanted: Any, close: Close) -> bool:
    if isinstance(wanted, list):
        return (
            isinstance(said, list)
            and len(said) == len(wanted)
            and all(_same(one, other, close) for one, other in zip(said, wanted, strict=True))
        )
    if isinstance(wanted, dict):
        return (
            isinstance(said, dict)
            and said.keys() == wanted.keys()
            and all(_same(said[key], wanted[key], close) for key in wanted)
        )
    if isinstance(wanted, bool) or isinstance(said, bool):
        return said is wanted
    if isinstance(wanted, float) and isinstance(said, int | float):
        return close(said, wanted)
    return bool(said == wanted)


def _same_text(said: str, wanted: str, close: Close) -> bool:
    """Line by line and word by word; numbers that are wanted with a fraction may differ a little."""
    lines, others = said.rstrip().split("\n"), wanted.rstrip().split("\n")
    if len(lines) != len(others):
        return False
    for line, other in zip(lines, others, strict=True):
        words, more = line.split(), other.split()
        if words != more and not (
            len(words) == len(more) and all(_near(word, like, close) for word, like in zip(words, more, strict=True))
        ):
            return False
    return True


def _near(said: str, wanted: str, close: Close) -> bool:
    if said == wanted:
        return True
    if "." not in wanted and "e" not in wanted:
        return False
    try:
        return close(float(said), float(wanted))
    except ValueError:
        return False
