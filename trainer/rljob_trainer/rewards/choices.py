"""Multiple choice (MMLU and its relatives): which letter a response gives as its answer."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any, Literal

from rljob_trainer.rewards.maths import last_boxed
from rljob_trainer.rewards.rules import RewardVerdict, required_answer, rule

_OPTIONS = 4
_WRAPPED = r"(?:[\s*_$(\[{\"'`]|\\text\{|\\mathrm\{|\\mathbf\{|\\boxed\{|\\\(){0,8}"
_ANOTHER = rf"(?:[\s*_$)\]}}\"'`]){{0,8}}(?:,|/|&|\bor\b|\band\b){_WRAPPED}([A-Z])(?![A-Za-z'])"
_LETTER = rf"{_WRAPPED}([A-Z])(?![A-Za-z'])(?:{_ANOTHER})?"
# A is an article too, and I a pronoun, where a word follows.
_STATED = re.compile(
    r"(?i:\banswer\b)[*_]{0,3}(?:\s{1,4}(?i:is|would be)\b|\s{0,4}[:：=])(?i:\s{1,4}(?:option|choice)\b)?"
    rf"{_LETTER}"
    r"(?!(?<=[AI])[ ][a-z])"
)
_BOX = re.compile(_LETTER)
_ALONE = re.compile(rf"{_LETTER}[\s*_$)\]}}\"'`.:]{{0,8}}")
_LAST_RESORT = re.compile(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])")


def _check_answer(cell: Any, given: Mapping[str, Any]) -> None:
    reference_letter(str(cell), given.get("options", _OPTIONS), given.get("answer_is", "letter"))


@rule("multipleChoice", inline=True, check_answer=_check_answer)
def multiple_choice(
    response: str,
    answer: str | None,
    *,
    options: int = _OPTIONS,
    method: Literal["strict", "flexible"] = "strict",
    answer_is: Literal["letter", "index"] = "letter",
) -> RewardVerdict:
    """1 when the response's last statement of a letter is the answer, else 0.

    A statement is ``\\boxed{C}``, ``answer is (C)``, ``Answer: C``, or a response that is nothing but the letter.
    ``flexible``: otherwise, the last letter on its own. Two letters (``A or B``), or a letter beyond the ``options``,
    count as no answer. The reference answer is a letter, or with ``index`` the number of the option, starting at 0.
    Raises ``ValueError`` for any other.
    """
    wanted = reference_letter(required_answer(answer), options, answer_is)
    said = stated_letter(response, options, method)
    return RewardVerdict(float(said == wanted), said, said == wanted)


def reference_letter(answer: str, options: int, answer_is: Literal["letter", "index"]) -> str:
    """The letter of a reference answer. Raises ``ValueError``."""
    if not 2 <= options <= 26:
        raise ValueError(f"params.options must be 2 to 26, not {options}; correct it")
    letters = string.ascii_uppercase[:options]
    text = answer.strip()
    if answer_is == "index" and text.isascii() and text.isdigit() and int(text) < options:
        return letters[int(text)]
    found = _ALONE.fullmatch(text) if answer_is == "letter" else None
    if found is None or found[2] or found[1] not in letters:
        kind = f"letter from A to {letters[-1]}" if answer_is == "letter" else f"number from 0 to {options - 1}"
        raise ValueError(
            f"the reference answer {answer[:80]!r} is not a {kind}; check the column of spec.data.answer, "
            "params.options and params.answerIs"
        )
    return found[1]


def stated_letter(response: str, options: int, method: Literal["strict", "flexible"]) -> str | None:
    """The letter that a response gives as its answer; None: none, or no single one."""
    letters = string.ascii_uppercase[:options]
    found: tuple[int, str, str | None] | None = None
    for match in _STATED.finditer(response):
        found = match.start(), match[1], match[2]
    boxed = last_boxed(response)
    if boxed is not None and (found is None or response.rfind(boxed) > found[0]):
        inside = _BOX.match(boxed)
        found = (0, inside[1], inside[2]) if inside else (0, "", None)
    if found is None and (alone := _ALONE.fullmatch(response)):
        found = 0, alone[1], alone[2]
    if found is None and method == "flexible":
        for match in _LAST_RESORT.finditer(response):
            if match[1] in letters:
                found = 0, match[1], None
    if found is None or found[2] is not None or not found[1] or found[1] not in letters:
        return None
    return found[1]
