"""Programs judged by tests in a real sandbox, in the formats of the common data sets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sandbox_places import why_not

from rljob_api.spec.reward import Reward
from rljob_trainer.errors import RewardError, RewardWorkerError
from rljob_trainer.rewards.code_tests import code_tests, program_in, read_tests
from rljob_trainer.rewards.pool import RewardPool
from rljob_trainer.rewards.terms import Response
from rljob_trainer.world.protocol import WorldError
from rljob_trainer.world.sandbox import LocalSandbox, ProgramResult, SandboxLimits

SUMS = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}
RIGHT = "a, b = map(int, input().split())\nprint(a + b)"
SOME = "a, b = map(int, input().split())\nprint(3 if a < 2 else 7)"


@pytest.fixture(scope="module", params=["landlock"])
def mode(request: pytest.FixtureRequest) -> Any:
    if reason := why_not(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture
async def sandbox(mode: Any) -> AsyncIterator[LocalSandbox]:
    async with LocalSandbox(
        mode, SandboxLimits(wall_seconds=4, cpu_seconds=4, memory_bytes=2**27), workers=2
    ) as opened:
        yield opened


async def score(sandbox: LocalSandbox, program: str, tests: Any, **params: Any) -> float:
    return (await code_tests(sandbox, program, tests, **params)).score


class Prints:
    """A sandbox in which every program prints the same."""

    def __init__(self, said: str) -> None:
        self.said = said

    async def run(self, *_: Any) -> ProgramResult:
        return ProgramResult("exited", 0, self.said, "", 0.0, False)


async def test_programs_that_print(sandbox: LocalSandbox) -> None:
    assert await score(sandbox, f"So:\n```python\n{RIGHT}\n```\nThat is it.", SUMS) == 1.0
    assert await score(sandbox, SOME, json.dumps(SUMS)) == 0.0
    verdict = await code_tests(sandbox, SOME, SUMS, score="fraction")
    assert (verdict.score, verdict.correct) == (pytest.approx(2 / 3), False)
    assert await score(sandbox, SOME, SUMS, most_tests=2) == 1.0
    # Lines as lists, and what runs only as the main program.
    lists = {"inputs": [["1", "2"]], "outputs": [["1", "2"]]}
    assert await score(sandbox, "if __name__ == '__main__':\n    print(input())\n    print(input())", lists) == 1.0


async def test_functions_that_are_called(sandbox: LocalSandbox) -> None:
    prime = {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}
    assert await score(sandbox, "def add(a, b):\n    print('noise')\n    return a + b", prime) == 1.0
    method = "class Solution:\n    def add(self, a: List[int], b: Optional[int]) -> int:\n        return a + b"
    assert await score(sandbox, method, prime) == 1.0
    assert await score(sandbox, method, prime, prelude=False) == 0.0
    apps = {"fn_name": "pair", "inputs": [["a", 1]], "outputs": [[["a", 1]]]}
    assert await score(sandbox, "def pair(a, b): return (a, b)", apps) == 1.0
    assert await score(sandbox, "def pair(a, b): return (b, a)", apps) == 0.0
    assert await score(sandbox, " + b", {**prime, "fn_name": "f"}, prefix="def f(a, b): return a") == 1.0
    # What the prelude has is no solution.
    gcd = {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}
    assert await score(sandbox, "pass", gcd) == 0.0
    assert await score(sandbox, "def gcd(a, b): return math.gcd(a, b)", gcd) == 1.0


async def test_tests_as_livecodebench_writes_them(sandbox: LocalSandbox) -> None:
    printed = [{"input": "1 2", "output": "3", "testtype": "stdin"}]
    assert await score(sandbox, RIGHT, json.dumps(printed)) == 1.0
    call = {"input": "[3, 1]", "output": "[1, 3]", "testtype": "functional", "metadata": {"func_name": "order"}}
    assert await score(sandbox, "class Solution:\n    def order(self, a): return sorted(a)", [call]) == 1.0


async def test_what_a_program_does_to_itself_is_a_failed_test(sandbox: LocalSandbox) -> None:
    verdict = await code_tests(sandbox, "import time; time.sleep(100)", SUMS, score="fraction", most_tests=1)
    assert (verdict.score, verdict.details) == (0.0, {"passed": 0.0, "timed_out": 1.0})
    tests = {"inputs": ["x"], "outputs": ["1"]}
    for program in (
        "x = bytearray(2**29)",
        "import os; os.kill(os.getpid(), 9)",
        "import sys; sys.exit(0)",
        "print(",
        "",
    ):
        assert await score(sandbox, program, tests) == 0.0, program


async def test_a_program_that_leaves_early_has_returned_nothing(sandbox: LocalSandbox) -> None:
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [[1]]}
    for program in ("import os; os._exit(0)", "def f(x): print(1); raise SystemExit(0)"):
        assert await score(sandbox, program, tests) == 0.0, program


@pytest.mark.parametrize(
    ("said", "wanted", "right"),
    [
        ("1  2 \n3\n\n", "1 2\n3", True),
        ("1\n2", "1 2", False),
        ("0.33333333", "0.333333333", True),
        ("0.3334", "0.333333333", False),
        ("3.0", "3", False),
        ("1000001", "1000000", False),
        ("nan", "0.5", False),
        ("0.0", "1e-9", False),
        ("1" + 400 * "0", "1.5", False),
    ],
)
async def test_outputs_are_compared_word_by_word(said: str, wanted: str, right: bool) -> None:
    tests = {"inputs": [""], "outputs": [wanted]}
    assert await score(Prints(said), "", tests) == float(right)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("returned", "wanted", "right"),
    [
        ("1" + 400 * "0", 1.5, False),
        ("1" + 400 * "0", 10**400, True),
        ("true", 1, False),
        ("1", True, False),
        ("[true]", [True], True),
        ("1.0", 1, True),
        ("0", 1e-9, False),
        ("1e-9", 1e-9, True),
        ("-0.0", 0.0, True),
        ("0.50000001", 0.5, True),
        ('"1"', 1, False),
    ],
)
async def test_results_are_compared_by_value_and_a_bool_only_with_a_bool(
    returned: str, wanted: Any, right: bool
) -> None:
    tests = {"fn_name": "f", "inputs": [[]], "outputs": [wanted]}
    assert await score(Prints(returned), "", tests) == float(right)  # type: ignore[arg-type]


@pytest.mark.parametrize("listed", [False, True])
async def test_small_numbers_may_differ_by_what_their_row_says(listed: bool) -> None:
    def tests(wanted: str) -> Any:
        one = {"input": "", "output": wanted, "absolute_tolerance": 1e-6}
        return [one] if listed else {"inputs": [""], "outputs": [wanted], "absolute_tolerance": 1e-6}

    assert await score(Prints("0.0"), "", tests("1e-9")) == 1.0  # type: ignore[arg-type]
    assert await score(Prints("0.0"), "", tests("1e-5")) == 0.0  # type: ignore[arg-type]
    # Arrow fills the field in rows that do not have it.
    assert read_tests({"inputs": [""], "outputs": ["1"], "absolute_tolerance": None})[0].slack == 0.0


def test_the_last_block_is_the_program() -> None:
    assert program_in("<think>```python\nno\n```</think>```\n1\n``` or ```py\n2\n``` end") == "2\n"
    assert program_in("<think>```python\nno\n``` and no end") == ""
    # As long as an answer can be, and no expression that takes the square of its length.
    assert program_in("<think>" * 200_000) == ""
    assert program_in("```python\nprint(1)") == "print(1)"
    assert program_in("print(1)") == "print(1)"


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("assert f(1) == 2", "is not JSON"),
        (["assert f(1) == 2"], "neither an object with inputs and outputs nor"),
        ({"inputs": ["1"]}, "it needs inputs and outputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "has no tests"),
        ({"inputs": [1], "outputs": ["1"]}, "'1' is not text and names no function"),
        ({"inputs": ["a"], "outputs": ["1"], "fn_name": "f"}, "test 0 of the reference answer: 'a' is not JSON"),
        ([{"input": "[1]", "output": "1", "testtype": "functional"}], "without naming it"),
        ({"inputs": ["1"], "outputs": ["1" * (2**20 + 1)]}, "expects 1048577 characters"),
        ({"inputs": ["1"], "outputs": ["1"], "absolute_tolerance": True}, "absolute_tolerance is 'True'"),
        (
            [{"input": "1", "output": "1", "absolute_tolerance": "1"}],
            "test 0 .* absolute_tolerance is '1'",
        ),
    ],
)
def test_what_is_no_tests(reference: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_tests(reference)


class Failing:
    """A sandbox whose workers die so many times."""

    def __init__(self, times: int) -> None:
        self.left = times

    async def run(self, *_: Any) -> ProgramResult:
        if self.left:
            self.left -= 1
            raise WorldError("its worker was killed")
        return ProgramResult("exited", 0, "3", "", 0.0, False)


async def test_a_sandbox_that_fails_is_asked_again_and_is_never_a_wrong_answer() -> None:
    tests = {"inputs": [""], "outputs": ["3"]}
    assert await score(Failing(3), "", tests) == 1.0  # type: ignore[arg-type]
    with pytest.raises(RewardWorkerError, match=r"the sandbox failed 4 times in a row.*its worker was killed"):
        await score(Failing(4), "", tests)  # type: ignore[arg-type]


async def test_samples_of_a_pool_run_in_its_sandbox(mode: Any) -> None:
    settings = Reward.model_validate(
        {
            "functions": [{"type": "codeTests", "params": {"seconds": 2.0, "score": "fraction"}}],
            "sandbox": {"isolation": mode},
            "onError": "score",
            "errorScore": -1.0,
        }
    )

    def sample(text: str, reference: Any) -> Response:
        return Response("?", text, str(reference), "s", 1, "stop", reference=reference, label=text[:20])

    async with RewardPool(settings, longest_response=9) as pool:
        assert pool.in_processes("s")
        right, some, broken = await pool.score_responses([sample(RIGHT, SUMS), sample(SOME, SUMS), sample("", "none")])
        assert (right.score, right.correct, right.parts) == (1.0, True, {"codeTests": 1.0})
        assert some.details == {"codeTests.passed": pytest.approx(2 / 3), "codeTests.timed_out": 0.0}
        assert broken.score == -1.0
        assert "'none' is not JSON" in str(broken.error)
        # A sandbox that is gone is no wrong answer, whatever onError says.
        pool._sandboxes["codeTests"] = Failing(9)  # type: ignore[assignment]
        with pytest.raises(RewardWorkerError, match=r"reward function 'codeTests' \(codeTests\) on a, b"):
            await pool.score_responses([sample(RIGHT, SUMS)])
    async with RewardPool(settings.model_copy(update={"on_error": "fail"}), longest_response=9) as pool:
        with pytest.raises(RewardError, match="is not JSON"):
            await pool.score_responses([sample("", "none")])
