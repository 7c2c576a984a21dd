"""Programs of the user's own, in the forms in which they may be written.

    async def episode(task, model, world, **params): ...  # a function

    class Search:  # a class with such a method
        def __init__(self, **params): ...
        async def episode(self, task, model, world): ...

    class Guess:  # a world that goes step by step, made anew for each episode
        def __init__(self, **params): ...
        def reset(self, task): ...  # what the model is told first; None: nothing more than the prompt
        def step(self, text): ...  # what the model is told now, a reward, whether the episode is over

Each may return a reward; in the third form each step's is earned by the answer that it was told.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rljob_trainer.episodes.curfew import EpisodeOverError
from rljob_trainer.episodes.environment import Task
from rljob_trainer.episodes.play import Voice
from rljob_trainer.episodes.programs import Program
from rljob_trainer.errors import JobFileError, ProgramError
from rljob_trainer.user_code import imported
from rljob_trainer.world.protocol import World


def program_of(name: str, params: Mapping[str, Any], field: str, base: Path) -> tuple[Program, object]:
    """The program ``module:name``, and what the user wrote. Raises ``JobFileError``."""
    written = imported(name, field, [base])
    if not inspect.isclass(written):
        _check_takes(written, params, name, field)
        return functools.partial(written, **params), written
    if _has(written, "reset") and _has(written, "step"):
        made = functools.partial(written, **params)
        _try(made, name, field)
        return StepByStep(made, name), written
    if not _has(written, "episode"):
        raise JobFileError(f"{field}: {name} has neither a method episode nor methods reset and step")
    program: Program = _try(functools.partial(written, **params), name, field).episode
    _check_takes(program, {}, f"{name}.episode", field)
    return program, written


class StepByStep:
    """The program of a world that is told what the model says, and says what comes of it."""

    def __init__(self, made: Callable[[], Any], name: str) -> None:
        """``made`` makes the world of one episode."""
        self._made = made
        self._name = name

    async def __call__(self, task: Task, model: Voice, world: World) -> dict[str, list[float]]:
        """The rewards of all steps. A world that is run again over a record takes its steps again."""
        game, earned = self._made(), list[float]()
        messages = task.messages
        if (told := await _result(game.reset(task))) is not None:
            messages = [*messages, self._message(task, "reset", told)]
        while True:
            try:
                answer = await model.chat(messages)
            except EpisodeOverError:
                return {"turn_rewards": earned}
            step = await _result(game.step(answer.text))
            try:
                told, reward, over = step
                earned.append(float(reward))
            except (TypeError, ValueError):
                raise ProgramError(
                    f"{task.id}: {self._name}.step returned {step!r}; it must return the text for the model, a number, "
                    "and whether the episode is over"
                ) from None
            if over:
                return {"turn_rewards": earned}
            messages = [*messages, answer.message, self._message(task, "step", told)]

    def _message(self, task: Task, method: str, told: Any) -> dict[str, Any]:
        """Any template makes words of anything: of None "None". Raises ``ProgramError``."""
        if not isinstance(told, str):
            raise ProgramError(
                f"{task.id}: {self._name}.{method} returned {told!r} for the model, which is {type(told).__name__}, "
                "not text"
            )
        return {"role": "user", "content": told}


async def _result(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def _has(kind: type, method: str) -> bool:
    return callable(vars(kind).get(method)) or any(callable(vars(base).get(method)) for base in kind.__mro__)


def _try(made: Callable[[], Any], name: str, field: str) -> Any:
    try:
        return made()
    except Exception as problem:  # of the user's code
        raise JobFileError(
            f"{field}: cannot create {name} with the given params ({type(problem).__name__}: {problem})"
        ) from problem


def _check_takes(function: Callable[..., Any], params: Mapping[str, Any], name: str, field: str) -> None:
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object that is called as an async function is
    ):
        raise JobFileError(f"{field}: {name} is not async; write async def, because it awaits the model")
    try:
        inspect.signature(function).bind("task", "model", "world", **params)
    except TypeError as problem:
        raise JobFileError(f"{field}: {name} must accept a task, the model, the world and params: {problem}") from None
