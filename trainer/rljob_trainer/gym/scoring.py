"""Answers to problems of reasoning-gym, scored by the package's own ``score_answer`` inside the sandbox."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_trainer.errors import RewardWorkerError
from rljob_trainer.gym.process import INSIDE, as_asked, interpreter
from rljob_trainer.world.protocol import WorldError
from rljob_trainer.world.sandbox import Prepared, ProgramResult, Sandbox
from rljob_trainer.world.sandbox.keeper.protocol import PREPARED

if TYPE_CHECKING:
    from rljob_api.spec.data import Data

PROGRAM = f"import {PREPARED}\n{PREPARED}.score()\n"
MADE, CHANGED = "MADE", "CHANGED"
_TRIES = 4


@dataclass(frozen=True, slots=True)
class GymScore:
    """What the package says about an answer."""

    score: float
    raised: bool = False
    """Scoring raised: the answer is none of the kind that the task asks for."""
    unfinished: bool = False
    """Scoring took longer, or more memory, than it may; or the answer was evaluated, and ended it."""


def prepared_gym(data: Data, base: Path | None) -> Prepared | None:
    """What the sandbox imports for the job's tasks; None: it has none. ``base`` is the job file's folder."""
    given = [part.task for part in data.train.sources] + [part.task for part in data.validation]
    tasks = [task for task in given if task is not None and task.type == "reasoningGym"]
    if not tasks:
        return None
    return prepared((as_asked(task) for task in tasks), interpreter(tasks[0], base))


def prepared(tasks: Iterable[Mapping[str, Any]], python: str | None) -> Prepared:
    """What the sandbox imports: the package, and data sets that take long to make. ``python`` None: this one."""
    asked = json.dumps(list(tasks))
    source = f"{INSIDE.read_text(encoding='utf-8')}\n\nprepare(json.loads({asked!r}))\n"
    return Prepared(source, python or sys.executable)


async def score_answer(sandbox: Sandbox, problem: Mapping[str, Any], answer: str) -> GymScore:
    """Scores one answer in a fork of its own. ``problem``: the row's origin (``inside.problem_of``).

    Raises ``ValueError`` when the problem is not the one that the model was asked, and ``RewardWorkerError`` when the
    sandbox fails, or the problem cannot be made, several times in succession: neither says anything of the answer.
    """
    failed = ""
    for attempt in range(_TRIES):
        word = secrets.token_hex(16)
        try:
            asked = json.dumps({"word": word, "problem": problem, "answer": answer})
            result = await sandbox.run(PROGRAM, asked)
        except WorldError as error:
            failed = str(error)
        else:
            said = _said(result, word)
            if said and said[0] == CHANGED:
                raise ValueError(
                    f"problem {problem['index']} of the task {problem['name']} differs from the one that the model "
                    "was asked: the task is not reproducible from its seed; remove it from the job"
                )
            if said and said[0] == MADE:
                return _verdict(said[1:])
            said_last = result.stderr.strip()[-300:] or "it said nothing"
            failed = f"the problem was not generated ({result.outcome}): {said_last}"
        if attempt + 1 < _TRIES:
            await asyncio.sleep(0.05 * 4**attempt)
    raise RewardWorkerError(
        f"scoring by reasoning-gym failed {_TRIES} times in a row, so the answer could not be judged: {failed}. "
        "Try again: the run continues from its last checkpoint; if problems take longer to generate than "
        "params.seconds, raise it; if a program ran out of memory, raise reward.sandbox.memoryMegabytes"
    )


def _said(result: ProgramResult, word: str) -> list[str]:
    """The lines of the program itself, without what an evaluated answer may have written between them."""
    return [line.removeprefix(f"{word} ") for line in result.stdout.splitlines() if line.startswith(f"{word} ")]


def _verdict(said: list[str]) -> GymScore:
    if not said:
        return GymScore(0.0, unfinished=True)
    verdict = json.loads(said[0])
    if "raised" in verdict:
        return GymScore(0.0, raised=True)
    score = float(verdict["score"])
    if not 0.0 <= score <= 1.0:
        raise ValueError(f"the task returned the score {score:g}, which is outside 0 to 1")
    return GymScore(score)
