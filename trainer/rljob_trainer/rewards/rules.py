"""The built-in reward functions' register, and the short ones: exact match, pattern, length.

A reward function takes what it names as keyword arguments: ``prompt``, ``response``, ``answer``, ``source``,
``tokens`` (response length), ``finish`` (``stop`` or ``length``), any column of its row, and its parameters (the
keyword-only ones: ``params`` of the job file). It returns a number or a ``RewardVerdict``. To add one, decorate it,
import its file in ``BUILT_IN``, and name it in ``rljob_api.spec.reward``.
"""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from rljob_trainer.episodes.episode import is_cut

BUILT_IN = ("rules", "gsm8k", "maths", "choices", "json_schema", "code_tests", "reasoning_gym")
"""The modules of this package that register functions."""


class TooSlowError(BaseException):
    """A rule has given up on a response that takes too long, which counts as a hang (``RewardRule.hang_score``).

    No ``Exception``: what is interrupted by it often catches all of these.
    """


class RewardVerdict(NamedTuple):
    """What a function says about a response."""

    score: float
    prediction: str | None = None
    """The extracted answer, in a form in which equal answers are equal strings (for maj@k)."""
    correct: bool | None = None
    details: Mapping[str, float] = {}
    """Further numbers, for metrics."""
    turns: tuple[float, ...] = ()
    """How much of the score each answer of an episode has earned."""


@dataclass(frozen=True, slots=True)
class RewardRule:
    """A built-in reward function."""

    function: Callable[..., Any]
    """Returns a number or a verdict, or an awaitable of one."""
    inline: bool
    """It can neither hang nor crash, so it runs in the driver's own process."""
    hang_score: float | None = None
    """The score of a response on which it hangs or crashes, when that is the response's fault; it is still reported."""
    prepare: Callable[[], object] | None = None
    """Does once what would make the first call slow; a worker calls it before the clock runs."""
    check_answer: Callable[[Any, Mapping[str, Any]], object] | None = None
    """Raises ``ValueError`` for a cell that is no reference answer, given the function's arguments: quick, so that
    thousands are looked at before a run."""
    sandboxed: bool = False
    """An async function that is given a sandbox, the response and the cell with the reference answer (``pool.py``)."""
    judged_by: str | None = None
    """The column that a sandboxed function is given in place of the reference answer."""


RULES: dict[str, RewardRule] = {}

Scoring = TypeVar("Scoring", bound=Callable[..., Any])


def rule(
    name: str,
    *,
    inline: bool,
    hang_score: float | None = None,
    prepare: Callable[[], object] | None = None,
    check_answer: Callable[[Any, Mapping[str, Any]], object] | None = None,
    sandboxed: bool = False,
    judged_by: str | None = None,
) -> Callable[[Scoring], Scoring]:
    """Registers a function under the name that ``spec.reward.functions[].type`` uses."""

    def register(function: Scoring) -> Scoring:
        RULES[name] = RewardRule(function, inline, hang_score, prepare, check_answer, sandboxed, judged_by)
        return function

    return register


def built_in(name: str) -> RewardRule | None:
    """The built-in function of that name, or None."""
    for module in BUILT_IN:
        importlib.import_module(f"rljob_trainer.rewards.{module}")
    return RULES.get(name)


@rule("environment", inline=True)
def environment(returned: Any, finish: str) -> Any:
    """The value returned by the environment's program: a number, or a mapping with ``score`` and optionally
    ``prediction`` and ``correct``. An episode that was truncated before its program returned scores 0."""
    return 0.0 if returned is None and is_cut(finish) else returned


def required_answer(answer: str | None) -> str:
    """The reference answer. Raises ``ValueError`` saying how to get one."""
    if answer is None:
        raise ValueError("the row has no reference answer; set spec.data.answer to its column")
    return answer


def normalised(text: str, ignore_case: bool = True) -> str:
    """Text without the differences that nobody means: Unicode forms, case, surrounding and repeated blanks."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    if ignore_case:
        text = text.casefold()
    return " ".join(text.split())


@rule("exactMatch", inline=True)
def exact_match(response: str, answer: str | None, *, ignore_case: bool = True, partial: bool = False) -> RewardVerdict:
    """1 when the response equals the answer after normalisation, else 0.

    ``partial``: instead the fraction of positions that agree, relative to the longer of the two: a gradual reward for
    models that start from scratch.
    """
    said, wanted = normalised(response, ignore_case), normalised(required_answer(answer), ignore_case)
    correct = said == wanted
    if not partial or correct:
        return RewardVerdict(float(correct), said, correct)
    agreeing = sum(a == b for a, b in zip(said, wanted, strict=False))
    return RewardVerdict(agreeing / max(len(said), len(wanted)), said, correct)


@rule("pattern", inline=False)
def pattern(response: str, *, pattern: str, full: bool = False, ignore_case: bool = False) -> float:
    """1 when the regular expression matches in the response (``full``: matches all of it), else 0.

    ``.`` also matches line breaks. Runs in a worker process, because a pattern can take exponential time.
    """
    compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    return float((compiled.fullmatch(response) if full else compiled.search(response)) is not None)


@rule("length", inline=True)
def length(tokens: int, *, coefficient: float = -0.001, free_tokens: int = 0) -> float:
    """``coefficient`` for each response token after the first ``free_tokens``."""
    return coefficient * max(0, tokens - free_tokens)


def overlong(tokens: int, *, longest: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    0 up to ``longest - buffer`` tokens, then down in a line to ``-penalty`` at ``longest``.
    """
    return min(-(tokens - (longest - buffer)) / buffer * penalty, 0.0)
