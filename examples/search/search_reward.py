"""Rewards of episodes with a search."""

from __future__ import annotations

import re
import string
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def last_words(conversation: list[dict[str, Any]], answer: str) -> dict[str, Any]:
    """1 where the last answer is the reference answer: what was said before is how it was found."""
    said = str(conversation[-1]["content"]).strip()
    return {"score": float(said == answer), "prediction": said, "correct": said == answer}


def exact_match(conversation: list[dict[str, Any]], golden_answers: list[str]) -> dict[str, Any]:
    """1 where what stands last between <answer> and </answer> is one of the right answers, as SQuAD compares: without
    capitals, punctuation and articles. It is Search-R1's only reward (arXiv 2503.09516, section 3.4)."""
    found = _ANSWER.findall(str(conversation[-1]["content"]))
    said = _plain(found[-1]) if found else ""
    right = bool(found) and any(said == _plain(answer) for answer in golden_answers)
    return {"score": float(right), "prediction": said, "correct": right}


def _plain(text: str) -> str:
    """A text as it is compared."""
    letters = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", letters).split())
