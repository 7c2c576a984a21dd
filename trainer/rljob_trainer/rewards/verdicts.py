"""What reward functions return, as plain numbers and texts: users' functions return, raise and name what they like."""

from __future__ import annotations

import hashlib
import math
import numbers
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from rljob_trainer.episodes.episode import RewardResult
from rljob_trainer.rewards.rules import RewardVerdict
from rljob_trainer.texts import writable

LARGEST_SCORE = 1e15
"""Training computes in float32, whose largest number is 3.4e38, with squares and sums of the scores of a batch: those
of 10^8 samples of this size are still finite."""
MOST_DETAILS = 32
"""Numbers that a function may return besides a sample's score: each is a metric."""
_LONGEST_NAME = 64
_LONGEST_PREDICTION = 16384
_LONGEST_MESSAGE = 2000
"""Characters of what a function says of itself: a prediction is kept in every sample, a message in the log."""


class UnusableError(Exception):
    """What a function returned is no verdict; the message says why."""


def list_of_one(returned: Any) -> list[Any]:
    """What a function of TRL's kind returned for one sample."""
    if isinstance(returned, str | bytes | Mapping):
        raise UnusableError(f"it returned {_shown(returned)} ({_type_name(returned)}); {_A_LIST}")
    try:
        values = list(returned)
    except TypeError:
        raise UnusableError(f"it returned {_shown(returned)} ({_type_name(returned)}); {_A_LIST}") from None
    if len(values) != 1:
        raise UnusableError(f"it returned {len(values)} rewards for 1 completion; {_A_LIST}")
    return values


_A_LIST = "a function that takes completions must return a list with a number or None for each"


def verdict_of(returned: Any, *, of_verl: bool = False) -> RewardVerdict:
    """What a function returned: a number, or a mapping with ``score`` and perhaps ``prediction`` and ``correct``, which
    verl calls ``pred`` and ``acc``. Its other numbers are details.

    ``turn_rewards``, what each answer of an episode of many turns has earned, come on top of ``score``, which may be
    left out beside them.

    All that is in it are plain numbers and texts afterwards, which can travel: nothing of the user's types.
    """
    details: dict[str, float] = {}
    turns: tuple[float, ...] = ()
    if isinstance(returned, RewardVerdict):
        score, prediction, correct, details = (
            returned.score,
            returned.prediction,
            returned.correct,
            dict(returned.details),
        )
        turns = returned.turns
    elif isinstance(returned, Mapping):
        turns = _turns(returned.get("turn_rewards"))
        if "score" not in returned and not turns:
            names = reprlib.repr(list(returned))[1:-1] if returned else "nothing"
            raise UnusableError(f"it returned a mapping without 'score', only with {plain_text(names)}")
        said = ("pred", "acc") if of_verl else ("prediction", "correct")
        prediction, correct = map(returned.get, said)
        score = _number(returned.get("score", 0.0)) + math.fsum(turns)
        if of_verl and correct not in (0, 1):
            correct = None
        details = _details(returned, {"score", *said[: 1 if of_verl and correct is None else 2]})
    else:
        score, prediction, correct = returned, None, None
    return RewardVerdict(
        _number(score),
        None if prediction is None else _kept_prediction(plain_text(str(prediction))),
        None if correct is None else bool(correct),
        details,
        turns,
    )


def _turns(given: Any) -> tuple[float, ...]:
    """The rewards of single answers. Raises ``UnusableError`` for what is no list of finite numbers."""
    if given is None:
        return ()
    if isinstance(given, str | bytes | Mapping):
        raise UnusableError(f"its turn_rewards are {_shown(given)} ({_type_name(given)}); {_EACH_ANSWER}")
    try:
        values = list(given)
    except TypeError:
        raise UnusableError(f"its turn_rewards are {_shown(given)} ({_type_name(given)}); {_EACH_ANSWER}") from None
    return tuple(_number(value) for value in values)


_EACH_ANSWER = "return a list with a number for each answer of the model"


def _details(returned: Mapping[Any, Any], taken: Collection[str]) -> dict[str, float]:
    """The finite numbers of a mapping but for those that are taken. Raises ``UnusableError`` for more than can be
    metrics."""
    found: dict[str, float] = {}
    for name, value in returned.items():
        if isinstance(name, str) and name not in taken and isinstance(value, numbers.Real):
            number = float(value)
            if math.isfinite(number) and abs(number) <= LARGEST_SCORE:
                found[plain_text(name)[:_LONGEST_NAME]] = number
    if len(found) > MOST_DETAILS:
        raise UnusableError(f"it returned {len(found)} numbers besides the score; at most {MOST_DETAILS} are allowed")
    return found


def _kept_prediction(text: str) -> str:
    """A prediction is compared with others and written beside its sample. Of one as long as a book the beginning is
    kept and a digest of the whole, so that equal predictions stay equal and others do not become so."""
    if len(text) <= _LONGEST_PREDICTION:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text[:_LONGEST_MESSAGE]}... ({len(text)} characters, SHA-256 {digest})"


def _number(value: Any) -> float:
    """Raises ``UnusableError`` for what is no number that training can hold."""
    number: float | None = None
    if not isinstance(value, str | bytes | bytearray):
        try:
            number = float(value)
        except OverflowError:  # of whole numbers and fractions beyond a float's range
            raise UnusableError(f"it returned a score ({_type_name(value)}) {_TOO_LARGE}") from None
        except BaseException:  # noqa: BLE001  whatever its own conversion raises
            number = None
    if number is None:
        raise UnusableError(
            f"it returned {_shown(value)} ({_type_name(value)}), which is not a number; return one, or a mapping with "
            "'score'"
        )
    if not math.isfinite(number):
        raise UnusableError(f"it returned the score {number}, which is not a finite number")
    if abs(number) > LARGEST_SCORE:
        raise UnusableError(f"it returned the score {number:g}, {_TOO_LARGE}")
    return number


_TOO_LARGE = f"beyond +-{LARGEST_SCORE:g}: training computes in float32, with squares and sums of scores; scale it down"


def too_large(result: RewardResult) -> str | None:
    """What is wrong with the weighted sum of terms that are each small enough; None: nothing."""
    if abs(result.score) <= LARGEST_SCORE:
        return None
    return f"the weighted sum of its rewards is {result.score:g}, {_TOO_LARGE}, or lower the weights"


def _type_name(value: Any) -> str:
    # Of the class itself: an instance may say anything of its own class.
    return plain_text(type.__dict__["__name__"].__get__(type(value)))


def _shown(value: Any) -> str:
    """A value as messages show it, whatever its ``__repr__`` does."""
    try:
        return plain_text(reprlib.repr(value))
    except BaseException:  # noqa: BLE001
        return "a value that cannot be shown"


def plain_text(text: str) -> str:
    """A text of the user's code that can travel and be written: of class ``str`` itself, without lone surrogates."""
    return writable(str.__str__(text))


def described_error(problem: BaseException) -> str:
    """Type, message and the innermost line of an exception, whatever its ``__str__`` does."""
    try:
        message = plain_text(str(problem))
    except BaseException as another:  # noqa: BLE001
        message = f"(its text cannot be read: that raises {_type_name(another)})"
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]}... ({len(message)} characters)"
    # Not traceback.extract_tb, which reads source files: the line's number is all that is wanted.
    trace = problem.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({plain_text(trace.tb_frame.f_code.co_filename)}, line {trace.tb_lineno})" if trace else ""
    return f"{_type_name(problem)}: {message}{where}"
