"""Scores in what a judge says. Whatever leaves a doubt is no score: a wrong one would be trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import regex

from rljob_api.spec.judge import plain_label
from rljob_trainer.errors import JobFileError

if TYPE_CHECKING:
    from rljob_api.spec.judge import JudgeParser

_NUMBER = re.compile(r"(?<![\w.,])[-+]?\d+(?:\.\d+)?(?![\w,]|\.\d)")
# In time linear in the text: a run of digits or of spaces is read once.
_OUT_OF = re.compile(r"((?<!\d)[-+]?\d++(?:\.\d++)?)\s*+(?:/|out of)\s*([-+]?\d+(?:\.\d+)?)")
_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)```", re.DOTALL)
_LONGEST = 65536
"""Characters that are looked at, from the end."""
_SECONDS = 1.0
"""For a pattern, which can take time exponential in the text; all of the driver waits for it. Not of Python's re, which
nothing ends."""
_SHOWN = 200


class NoScoreError(Exception):
    """What a judge said has no score; the message says why, and shows the end of it."""


def score_in(said: str, parser: JudgeParser) -> float:
    """The score that ``parser`` finds in what a judge said. Raises ``NoScoreError``."""
    text = said[-_LONGEST:].strip()
    if not text:
        raise NoScoreError("it was empty")
    try:
        return _READERS[parser.type](text, parser)
    except NoScoreError as error:
        end = text if len(text) <= _SHOWN else f"...{text[-_SHOWN:]}"
        raise NoScoreError(f"{error}: {end!r}") from None


def check_pattern(parser: JudgeParser, place: str) -> None:
    """Raises ``JobFileError`` for a pattern that Python's re takes and the module with a limit of time does not."""
    try:
        regex.compile(parser.pattern or "")
    except regex.error as problem:
        raise JobFileError(f"{place}.judge.parser.pattern: not a valid pattern ({problem}); correct it") from None


def _last_line(text: str) -> str:
    return text.splitlines()[-1]


def _number_in(text: str, parser: JudgeParser) -> float:
    line = _last_line(text)
    for whole in _OUT_OF.finditer(line):
        if float(whole[2]) == parser.high:
            line = line.replace(whole[0], whole[1])
    found = _NUMBER.findall(line)
    if len(found) != 1:
        raise NoScoreError(f"its last line has {len(found) or 'no'} numbers")
    return _within(float(found[0]), parser)


def _group_of(text: str, parser: JudgeParser) -> float:
    try:
        found = regex.findall(parser.pattern or "", text, timeout=_SECONDS)  # texts of the one group
    except TimeoutError:
        raise NoScoreError(f"matching the pattern took longer than {_SECONDS:g} s") from None
    if not found or not found[-1]:
        raise NoScoreError("the pattern does not match")
    return _value(found[-1].strip(), parser)


def _field_of(text: str, parser: JudgeParser) -> float:
    fenced = _FENCE.findall(text)
    tries = [fenced[-1]] if fenced else [text, text[text.find("{") : text.rfind("}") + 1]]
    for candidate in tries:
        try:
            told = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(told, dict):
            if parser.field not in told:
                raise NoScoreError(f"its JSON has no field {parser.field!r}")
            return _value(told[parser.field], parser)
    raise NoScoreError("it has no JSON object")


def _label_of(text: str, parser: JudgeParser) -> float:
    return _labelled(_last_line(text).rpartition(":")[2], parser)


_READERS: dict[str, Callable[[str, JudgeParser], float]] = {
    "number": _number_in,
    "pattern": _group_of,
    "json": _field_of,
    "label": _label_of,
}


def _value(told: Any, parser: JudgeParser) -> float:
    """What a group or a field holds, as a score."""
    if parser.labels:
        return _labelled(str(told), parser)
    if isinstance(told, bool):
        return _within(parser.high if told else parser.low, parser)
    if isinstance(told, str):
        if not _NUMBER.fullmatch(told.strip()):
            raise NoScoreError(f"{told[:_SHOWN]!r} is not a number")
        told = float(told)
    if not isinstance(told, int | float):
        raise NoScoreError(f"{str(told)[:_SHOWN]!r} is not a number")
    return _within(told, parser)


def _labelled(said: str, parser: JudgeParser) -> float:
    wanted = plain_label(said)
    for label in parser.labels:
        if plain_label(label.label) == wanted:
            return label.score
    raise NoScoreError(f"{said.strip()[:_SHOWN]!r} is not one of the labels")


def _within(number: float, parser: JudgeParser) -> float:
    if not parser.low <= number <= parser.high:  # NaN neither
        raise NoScoreError(f"{number:g} is outside {parser.low:g} to {parser.high:g}")
    return (number - parser.low) / (parser.high - parser.low) if parser.scale else float(number)
