"""The built-in reward functions against hand-made tables and the real GSM8K file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rljob_trainer.rewards import maths
from rljob_trainer.rewards.gsm8k import gsm8k, number_in
from rljob_trainer.rewards.maths import last_boxed, math
from rljob_trainer.rewards.rules import RewardVerdict, TooSlowError, exact_match, length, normalised, overlong, pattern

GSM8K = Path(__file__).parents[3] / "examples" / "data" / "gsm8k"


def solutions(name: str) -> list[str]:
    with (GSM8K / name).open(encoding="utf-8") as file:
        return [json.loads(line)["answer"] for line in file]


@pytest.mark.parametrize(("name", "rows"), [("train.jsonl", 7473), ("test.jsonl", 1319)])
def test_every_gold_solution_of_gsm8k_scores_one_against_itself(name: str, rows: int) -> None:
    answers = solutions(name)
    assert len(answers) == rows
    for answer in answers:
        marked = answer.rsplit("#### ", 1)[1].replace(",", "").strip()
        assert gsm8k(answer, answer) == RewardVerdict(1.0, marked, True)
        assert gsm8k(f"The answer is ${marked}.", marked, method="flexible").score == 1.0


def test_solutions_of_other_problems_score_mostly_zero() -> None:
    answers = solutions("test.jsonl")
    scores = [gsm8k(other, answer).score for other, answer in zip(answers[1:], answers[:-1], strict=True)]
    assert sum(scores) / len(scores) < 0.03


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 72", "72", "72"),
        ("####72", "72", "72"),
        ("so 7 and 8.\n#### $1,234,567.50 dollars", "1234567.5", "1234567.5"),
        ("#### 5\nno wait\n#### 6", "6", "6"),
        ("#### -3", "-3", "-3"),
        ("#### −3 degrees", "-3", "-3"),
        ("#### 12. Then 13 more", "12", "12"),
        ("#### 007.00", "7", "7"),
        ("#### -0.0", "0", "0"),
        ("#### none, but 4 apples", None, "4"),
        ("It is 10-5", None, "5"),
        ("f(x) = -5.", None, "-5"),
        ("one of 1,2,3", None, "3"),
        ("$ 1,000.", None, "1000"),
        ("50%", None, "50"),
        (".5", None, "0.5"),
        ("72 ####", None, "72"),
        ("no number", None, None),
        ("", None, None),
    ],
)
def test_number_that_gsm8k_reads(text: str, strict: str | None, flexible: str | None) -> None:
    assert number_in(text, "strict") == strict
    assert number_in(text, "flexible") == flexible


def test_references_that_math_verify_would_read_in_part_are_refused() -> None:
    """Of a sum of a thousand fractions it reads one term. The sum of 1/(n(n+1)) from 1 to N is N/(N+1)."""

    def series(terms: int) -> str:
        return "+".join(rf"\frac{{1}}{{{n * (n + 1)}}}" for n in range(1, terms + 1))

    assert len(series(120)) < 2000 < len(series(1000))
    assert math(r"\boxed{\frac{120}{121}}", series(120)).score == 1.0
    assert math(r"\boxed{\frac{1}{2}}", series(120)).score == 0.0
    with pytest.raises(ValueError, match="characters, but math-verify reads only expressions of up to 2000"):
        math(r"\boxed{\frac{1}{2}}", series(1000))
    # What is said at such length is no answer, whatever would be read of it.
    for last in (r"\frac{1}{2}", r"\frac{1}{1001000}"):
        assert math(rf"\boxed{{{series(1000)}}}", last).score == 0.0


def test_gsm8k_gives_the_format_score_for_a_wrong_number_in_the_right_place() -> None:
    assert gsm8k("#### 71", "#### 72", format_score=0.1) == RewardVerdict(0.1, "71", False)
    assert gsm8k("71", "#### 72", format_score=0.1) == RewardVerdict(0.0, None, False)
    with pytest.raises(ValueError, match="has no number"):
        gsm8k("#### 71", "seventy-two")
    with pytest.raises(ValueError, match=r"spec\.data\.answer"):
        gsm8k("#### 71", None)


@pytest.mark.parametrize(
    ("response", "answer", "score", "share"),
    [
        ("46", "46", 1.0, 1.0),
        (" 46\n", "46", 1.0, 1.0),
        ("Paris", "paris", 1.0, 1.0),
        ("the  cat", "the cat", 1.0, 1.0),
        ("ﬁne", "fine", 1.0, 1.0),  # NFKC: the ligature
        ("47", "46", 0.0, 1 / 2),
        ("461", "46", 0.0, 2 / 3),
        ("4", "46", 0.0, 1 / 2),
        ("64", "46", 0.0, 0.0),
        ("", "46", 0.0, 0.0),
        ("", "", 1.0, 1.0),
    ],
)
def test_exact_match_and_its_share_of_positions(response: str, answer: str, score: float, share: float) -> None:
    assert exact_match(response, answer) == RewardVerdict(score, normalised(response), score == 1.0)
    assert exact_match(response, answer, partial=True).score == pytest.approx(share)


def test_exact_match_minds_case_when_told() -> None:
    assert exact_match("Paris", "paris", ignore_case=False).score == 0.0


def test_pattern_searches_or_describes_the_whole_response() -> None:
    form = r"<think>.*</think>\s*<answer>\d+</answer>"
    response = "well <think>a\nb</think> <answer>7</answer>"
    assert pattern(response, pattern=form) == 1.0
    assert pattern(response, pattern=form, full=True) == 0.0
    assert pattern(response.removeprefix("well "), pattern=form, full=True) == 1.0
    assert pattern(response.upper(), pattern=form) == 0.0
    assert pattern(response.upper(), pattern=form, ignore_case=True) == 1.0


def test_length_is_linear_beyond_the_free_tokens() -> None:
    assert [length(n, coefficient=-0.5, free_tokens=10) for n in (0, 10, 11, 14)] == [0, 0, -0.5, -2.0]


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (80, 0), (81, -0.1), (90, -1.0), (100, -2.0), (110, -3.0)])
def test_overlong_falls_in_a_line_over_the_buffer(tokens: int, expected: float) -> None:
    # Longest 100, buffer 20, penalty 2: equation 13 of DAPO times 2, by hand.
    assert overlong(tokens, longest=100, buffer=20, penalty=2.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{72}.", "72"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {x}", "x"),
        (r"\fbox{y}", "y"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{a \boxed{b} c}", "b"),
        ("}} no box {", None),
    ],
)
def test_the_last_closed_box(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"Thus \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"Thus \boxed{0.5}", r"\frac12", 1.0),
        (r"Thus \boxed{\frac{3}{4}}", r"\frac{1}{2}", 0.0),
        (r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$", 1.0),
        (r"\boxed{2\sqrt{2}}", r"so it is \boxed{\sqrt{8}}", 1.0),
        (r"\boxed{(1,2)}", "(1, 2)", 1.0),
        (r"\boxed{(2,1)}", "(1, 2)", 0.0),
        ("The answer is $7$.", "7", 1.0),
        (r"\boxed{\frac{}}{{", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_mathematical_equivalence(response: str, answer: str, score: float) -> None:
    verdict = math(response, answer)
    assert (verdict.score, verdict.correct) == (score, score == 1.0)


def test_math_can_insist_on_a_box_and_refuses_an_answer_that_is_none() -> None:
    assert math("The answer is $7$.", "7", boxed_only=True).score == 0.0
    with pytest.raises(ValueError, match="is not mathematics"):
        math(r"\boxed{7}", "")


def test_time_in_which_the_process_is_stopped_does_not_count_for_mathematics() -> None:
    """It stops itself while it reads the reference answer, for longer than it has processor time for that."""
    program = r"""
import os, signal
from rljob_trainer.rewards import maths
maths._SECONDS = 2
maths._prepare()
signal.signal(signal.SIGVTALRM, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
signal.setitimer(signal.ITIMER_VIRTUAL, 0.02)
halves = "+".join([r"\frac{1}{2}"] * 100)
print(maths.math(r"\boxed{50}", halves).score)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        time.sleep(2.5)
        child.send_signal(signal.SIGCONT)
        assert child.stdout.read() == "1.0\n"


def test_a_reference_answer_that_cannot_be_read_in_time_is_refused_and_such_a_response_is_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maths._prepare()
    monkeypatch.setattr(maths, "_SECONDS", 0.05)
    # An interruption may fall into a callback of somebody's, and is lost then.
    monkeypatch.setattr(maths, "_AGAIN_SECONDS", 0.02)
    halves = "+".join([r"\frac{1}{2}"] * 160)  # read in 0.3 s at the least where 7 takes 4 ms
    with pytest.raises(
        ValueError, match=r"^reading the reference answer '.*' takes more than 0.05 s of processor time, so every"
    ):
        math(r"\boxed{500}", halves)
    with pytest.raises(TooSlowError, match=r"^reading the response takes more than"):
        math(rf"\boxed{{{halves}}}", "500")
    assert math(r"\boxed{\frac{1}{2}}", "0.5").score == 1.0
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_an_interruption_that_falls_into_the_end_of_an_object_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised in ``__del__`` goes to ``sys.unraisablehook`` and no further."""
    lost: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: lost.append(raised.exc_type.__name__))
    monkeypatch.setattr(maths, "_SECONDS", 0.02)
    monkeypatch.setattr(maths, "_AGAIN_SECONDS", 0.02)

    class LongEnd:
        def __del__(self) -> None:
            spend(5)

    def spend(seconds: float) -> None:
        begun = time.process_time()
        while time.process_time() - begun < seconds:
            sum(range(1000))

    @maths._limited("waiting")
    def wait() -> None:
        ended = LongEnd()
        del ended
        spend(10)

    with pytest.raises(TooSlowError):
        wait()
    assert lost == ["TooSlowError"]
