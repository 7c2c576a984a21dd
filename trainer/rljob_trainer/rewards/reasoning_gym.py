"""Answers to problems of reasoning-gym, scored as the package scores them (``rljob_trainer/gym``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rljob_trainer.gym.scoring import score_answer
from rljob_trainer.rewards.rules import RewardVerdict, rule
from rljob_trainer.world.sandbox import Sandbox

DEFAULT_SECONDS = 10.0


@rule("reasoningGym", inline=False, sandboxed=True, judged_by="problem")
async def reasoning_gym(
    sandbox: Sandbox,
    response: str,
    problem: Mapping[str, Any],
    *,
    answer_in: Literal["tags", "response"] = "tags",
    tag: str = "answer",
    seconds: float = DEFAULT_SECONDS,
) -> RewardVerdict:
    """The score of the problem's own `score_answer`, from 0 to 1; 1 is correct.

    The answer is the text between the last `<answer>` and `</answer>`, as the package's prompts request
    (``answer_in`` response: the whole response; ``tag``: another tag). A response without an answer scores 0, and so
    does one for which scoring raises an error or takes longer than ``seconds``, including the time to regenerate the
    problem. `answered`, `raised` and `unfinished` are counted. Raises ``ValueError`` if the regenerated problem
    differs, ``RewardWorkerError`` when the sandbox fails.
    """
    answer = response.strip() if answer_in == "response" else tagged(response, tag)
    if answer is None:
        return RewardVerdict(0.0, None, False, {"answered": 0.0, "raised": 0.0, "unfinished": 0.0})
    said = await score_answer(sandbox, problem, answer)
    details = {"answered": 1.0, "raised": float(said.raised), "unfinished": float(said.unfinished)}
    return RewardVerdict(said.score, answer, said.score >= 1.0, details)


def tagged(response: str, tag: str) -> str | None:
    """What stands between the last pair of tags, without surrounding blanks; None: there is no pair."""
    begin, end, found, at = f"<{tag}>", f"</{tag}>", None, 0
    while (start := response.find(begin, at)) >= 0 and (stop := response.find(end, start + len(begin))) >= 0:
        found, at = response[start + len(begin) : stop], stop + len(end)
    return None if found is None else found.strip()
