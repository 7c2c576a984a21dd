"""GSM8K: grade-school word problems whose solutions end in ``#### number`` (arXiv 2110.14168)."""

from __future__ import annotations

import re
from typing import Literal

from rljob_trainer.rewards.rules import RewardVerdict, required_answer, rule

# A minus after a digit, letter or bracket is a subtraction. Commas only separate thousands. All patterns here take
# time linear in the text.
_NUMBER = r"((?<![\w.)])-)?\$? ?(\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(\.\d+)?"
_LAST_NUMBER = re.compile(rf"(?=[-$.\d]){_NUMBER}")
_MARKED = re.compile(rf"####[ \t]*{_NUMBER}")


@rule("gsm8k", inline=True)
def gsm8k(
    response: str,
    answer: str | None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> RewardVerdict:
    """1 when the number in the response equals the answer's, else 0.

    ``strict`` reads the number after the last ``####``; ``flexible`` falls back to the last number of the text.
    A wrong number in the right place scores ``format_score``. Dollar signs, thousands separators, units and
    trailing zeros are ignored. The answer is a whole solution (``... #### 72``) or just the number. Raises
    ``ValueError`` if the answer has no number.
    """
    reference = required_answer(answer)
    wanted = number_in(reference, "flexible")
    if wanted is None:
        raise ValueError(
            f"the reference answer {reference[-80:]!r} has no number; check the column of spec.data.answer"
        )
    said = number_in(response, method)
    if said is None:
        return RewardVerdict(0.0, None, False)
    correct = said == wanted
    return RewardVerdict(1.0 if correct else format_score, said, correct)


def number_in(text: str, method: Literal["strict", "flexible"]) -> str | None:
    """The answer in a solution, in canonical form (``-1234.5``), or None."""
    text = text.replace("−", "-")
    found = _last(_MARKED, text)
    if found is None and method == "flexible":
        found = _last(_LAST_NUMBER, text)
    return found


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    last = None
    for match in pattern.finditer(text):
        if match[2] or match[3]:
            last = match
    if last is None:
        return None
    whole = (last[2] or "").replace(",", "").lstrip("0") or "0"
    fraction = (last[3] or "").rstrip("0").rstrip(".")
    sign = "-" if last[1] and (whole, fraction) != ("0", "") else ""
    return sign + whole + fraction
