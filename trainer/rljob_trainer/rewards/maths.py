"""Mathematical equivalence of answers (the MATH data set and its relatives), judged by math-verify.

math-verify can be slow and is interrupted by a signal, which needs the main thread: this rule always runs in worker
processes. The limits are of processor time: math-verify's own are alarms of the wall clock, which goes on while the
process is stopped or waits for a processor.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rljob_trainer.rewards.rules import RewardVerdict, TooSlowError, normalised, required_answer, rule

_BRACES = re.compile(r"(\\boxed\s*\{|\\fbox\s*\{)|\\[{}]|[{}]")
_LONGEST = 2000
"""Characters of an expression. math-verify reads sums of 4,000 characters rightly; of one of 14,000 it reads a single
term, without a word."""
_SECONDS = 5.0
"""Processor time per parse and per comparison."""
_AGAIN_SECONDS = 0.5
"""An interruption that comes while Python ends an object is printed and forgotten: it comes again after so long."""

# It warns that its own limits are switched off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def _prepare() -> None:
    """SymPy and the LaTeX parser take seconds to load."""
    math(r"\boxed{\frac{1}{2}}", "0.5")


def _check_answer(cell: Any, _: Mapping[str, Any]) -> None:
    if problem := reference_problem(str(cell)):
        raise ValueError(problem)


@rule("math", inline=False, hang_score=0.0, prepare=_prepare, check_answer=_check_answer)
def math(response: str, answer: str | None, *, boxed_only: bool = False) -> RewardVerdict:
    """1 when the last ``\\boxed{...}`` of the response (else its last expression) equals the answer, else 0.

    ``boxed_only``: a response without a box scores 0. The answer is a whole solution with a box, or an expression. A
    response that cannot be parsed or judged in time (``10^{10^{10}}``), or has more than 2,000 characters, counts as
    wrong. Raises ``ValueError`` for an answer that is not mathematics, is longer than that, or takes more than 5 s of
    processor time to parse, and ``TooSlowError`` for a response that takes as long.
    """
    from math_verify import parse, verify

    reference = required_answer(answer)
    wanted_text = last_boxed(reference)
    if wanted_text is None:
        wanted_text = reference.strip().strip("$")
    said_text = last_boxed(response)
    if said_text is None and boxed_only:
        return RewardVerdict(0.0, None, False)
    if problem := reference_problem(reference):
        raise ValueError(problem)
    if said_text is not None and normalised(said_text, False) == normalised(wanted_text, False):
        return RewardVerdict(1.0, normalised(said_text, False), True)
    if said_text is not None and len(said_text) > _LONGEST:
        return RewardVerdict(0.0, normalised(said_text, False), False)
    try:
        with _limited(f"reading the reference answer {wanted_text[:80]!r}"):
            wanted = parse(f"\\boxed{{{wanted_text}}}", parsing_timeout=None)
    except TooSlowError as slow:
        raise ValueError(f"{slow}, so every response would count as wrong; shorten it, or remove the row") from None
    if not wanted:
        raise ValueError(f"the reference answer {wanted_text[:80]!r} is not mathematics; check spec.data.answer")
    with _limited("reading the response"):
        said = parse(response if said_text is None else f"\\boxed{{{said_text}}}", parsing_timeout=None)
    with _limited("comparing the response with the reference answer"):
        correct = bool(said) and bool(verify(wanted, said, timeout_seconds=None))
    prediction = said_text if said_text is not None else (str(said[-1]) if said else None)
    return RewardVerdict(float(correct), None if prediction is None else normalised(prediction, False), correct)


def reference_problem(reference: str) -> str | None:
    """What is known to be wrong with a reference answer before it is parsed."""
    boxed = last_boxed(reference)
    text = reference.strip().strip("$") if boxed is None else boxed
    if len(text) <= _LONGEST:
        return None
    return (
        f"the reference answer {text[:40]!r}... has {len(text)} characters, but math-verify reads only expressions "
        f"of up to {_LONGEST}; shorten it, or remove the row"
    )


@contextmanager
def _limited(doing: str) -> Iterator[None]:
    """Interrupts with ``TooSlowError`` what takes more than ``_SECONDS`` of this process's processor time."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TooSlowError(f"{doing} takes more than {_SECONDS:g} s of processor time")

    before = signal.signal(signal.SIGPROF, interrupt)
    try:
        signal.setitimer(signal.ITIMER_PROF, _SECONDS, _AGAIN_SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def last_boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{...}`` (or ``\\fbox``), braces matched; None without one that is closed."""
    open_braces: list[int | None] = []  # where a box's content begins, None for other braces
    last: tuple[int, int] | None = None
    for token in _BRACES.finditer(text):
        if token[0] == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None and (last is None or begin > last[0]):
                last = begin, token.start()
        elif token[0] == "{":
            open_braces.append(None)
        elif token[1]:
            open_braces.append(token.end())
    return None if last is None else text[last[0] : last[1]]
