"""Rewards of episodes with an interpreter."""

from __future__ import annotations

from typing import Any

from rljob_trainer.rewards.maths import math


def last_words(conversation: list[dict[str, Any]], answer: str) -> dict[str, Any]:
    """1 where the last answer is the reference answer: what was said before is how it was found."""
    said = str(conversation[-1]["content"]).strip()
    return {"score": float(said == answer), "prediction": said, "correct": said == answer}


def retool(response: str, answer: str, conversation: list[dict[str, Any]]) -> dict[str, Any]:
    """1 for a right boxed answer, -1 for a wrong one.

    A wrong one that was worked at with the interpreter costs less, by 0.1 for each time that it was asked, down to
    -0.6, as in the published recipe: the model begins by hardly calling.
    """
    verdict = math(response, answer)
    asked = sum(message["role"] == "tool" for message in conversation)
    score = 1.0 if verdict.correct else min(-0.6, -1.0 + 0.1 * asked)
    return {"score": score, "prediction": verdict.prediction, "correct": bool(verdict.correct), "asked": asked}
