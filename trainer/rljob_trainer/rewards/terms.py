"""The terms of a job's reward: which function each one calls with what, and what comes out as a sample's score.

No processes here: ``Term.score`` calls the function, ``combine`` adds the terms up. The driver uses both for the
quick built-in rules, a worker process for the rest.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import re
import reprlib
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rljob_trainer.errors import JobFileError
from rljob_trainer.rewards.rules import Verdict, built_in, overlong
from rljob_trainer.samples import RewardResult

if TYPE_CHECKING:
    from rljob_api.spec.reward import Reward


class Response(NamedTuple):
    """All that a reward function may ask for by naming it; ``columns`` are the other columns of the row."""

    prompt: str
    response: str
    answer: str | None
    source: str
    tokens: int
    finish: str
    columns: Mapping[str, Any] = {}
    label: str = ""
    """Which sample of which prompt this is, for messages."""


@dataclass(frozen=True, slots=True)
class TermSpec:
    """A term as plain data: what a worker process is told."""

    name: str
    type: str
    place: str
    """The job file's path, for messages."""
    weight: float = 1.0
    sources: frozenset[str] = frozenset()
    """Data sources that it applies to; empty: all."""
    function: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """How messages call it."""
        return f"{self.name!r} ({self.function or self.type})"

    def applies_to(self, source: str) -> bool:
        return not self.sources or source in self.sources


@dataclass(frozen=True, slots=True)
class Failure:
    """A term that gave no verdict on a sample."""

    term: str
    problem: str
    ended: bool = False
    """It hung or crashed, and its worker process is no more."""


Outcome = dict[str, Verdict | Failure]
"""What the terms said about one sample, by their names."""

STANDARD = ("prompt", "response", "answer", "source", "tokens", "finish")
"""What every sample has, besides the columns of its row."""


class Term:
    """A term ready to be called."""

    def __init__(self, spec: TermSpec) -> None:
        """Imports the function. Raises ``JobFileError`` when that fails or the parameters don't fit."""
        self.spec = spec
        rule = None if spec.type == "custom" else built_in(spec.type)
        if spec.type != "custom" and rule is None:
            raise JobFileError(f"{spec.place}.type: there is no reward function {spec.type!r}")
        self.inline = rule is not None and rule.inline
        self.hang_score = rule.hang_score if rule else None
        self._prepare = rule.prepare if rule else None
        self._function: Callable[..., Any] = rule.function if rule else _imported(spec)
        self.is_async = inspect.iscoroutinefunction(self._function)
        self._params = dict(spec.params) if rule is None else _checked_params(spec, self._function)
        signature = _signature(self._function)
        self._takes_all = signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        self._names = frozenset(signature.parameters) if signature else frozenset()
        if not self._takes_all and (unknown := sorted(set(self._params) - self._names)):
            raise JobFileError(
                f"{spec.place}.params: {spec.title} takes no {', '.join(map(repr, unknown))}; "
                f"it takes {', '.join(sorted(self._names - set(STANDARD))) or 'none'}"
            )
        if spec.type == "pattern":
            _check_pattern(spec)
        self._wanted_standard = tuple(n for n in STANDARD if self._takes_all or n in self._names)
        self._wants_columns = self._takes_all or bool(self._names - set(STANDARD) - set(self._params))

    def prepare(self) -> None:
        """Does what would make the first call slow."""
        if self._prepare is not None:
            self._prepare()

    def applies_to(self, source: str) -> bool:
        return self.spec.applies_to(source)

    def score(self, response: Response) -> Verdict | Failure:
        """Calls a function that is not async. Whatever it raises becomes a ``Failure`` that says where."""
        try:
            returned = self._function(**self._arguments(response))
        except (Exception, SystemExit) as problem:  # noqa: BLE001  the user's code may raise anything
            return Failure(self.spec.name, _described(problem))
        return self._judged(returned)

    async def score_async(self, response: Response) -> Verdict | Failure:
        """As ``score``, for an async function. Cancellation goes through."""
        try:
            called: Awaitable[Any] = self._function(**self._arguments(response))
            returned = await called
        except (Exception, SystemExit) as problem:  # noqa: BLE001  as in score
            return Failure(self.spec.name, _described(problem))
        return self._judged(returned)

    def _judged(self, returned: Any) -> Verdict | Failure:
        """What was returned as a verdict, or what is wrong with it."""
        try:
            return _verdict(returned)
        except Exception as problem:  # noqa: BLE001  also what conversions of the user's types raise
            return Failure(self.spec.name, str(problem) or type(problem).__name__)

    def _arguments(self, response: Response) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if self._wants_columns:
            if self._takes_all:
                arguments.update(response.columns)
            else:
                arguments.update((k, v) for k, v in response.columns.items() if k in self._names)
        for name in self._wanted_standard:
            arguments[name] = getattr(response, name)
        arguments.update(self._params)
        return arguments


def term_specs(reward: Reward) -> list[TermSpec]:
    """The terms of ``spec.reward``. Raises ``JobFileError`` when two have the same name."""
    specs = []
    for index, function in enumerate(reward.functions):
        params = dict(function.params)
        if function.pattern is not None:
            params["pattern"] = function.pattern
        specs.append(
            TermSpec(
                name=function.name or function.type,
                type=function.type,
                place=f"spec.reward.functions[{index}]",
                weight=function.weight,
                sources=frozenset(function.sources),
                function=function.function,
                params=params,
            )
        )
    names = [spec.name for spec in specs] + (["overlong"] if reward.overlong else [])
    for spec in specs:
        if names.count(spec.name) > 1:
            raise JobFileError(
                f"{spec.place}.name: {spec.name!r} is there twice; give each reward function its own name"
            )
    return specs


@dataclass(frozen=True, slots=True)
class OverlongSettings:
    """DAPO's soft punishment, with the run's longest response."""

    longest: int
    buffer: int
    penalty: float


def combine(
    specs: Sequence[TermSpec], outcome: Outcome, tokens: int, punishment: OverlongSettings | None
) -> RewardResult:
    """The weighted sum of the verdicts (all must be there), with the parts unweighted.

    Prediction and correctness are those of the first term, in the job file's order, that knows them.
    """
    parts: dict[str, float] = {}
    score = 0.0
    prediction: str | None = None
    correct: bool | None = None
    for spec in specs:
        verdict = outcome.get(spec.name)
        if verdict is None:
            continue
        assert isinstance(verdict, Verdict)
        parts[spec.name] = verdict.score
        score += spec.weight * verdict.score
        prediction = verdict.prediction if prediction is None else prediction
        correct = verdict.correct if correct is None else correct
    if punishment is not None:
        parts["overlong"] = overlong(
            tokens, longest=punishment.longest, buffer=punishment.buffer, penalty=punishment.penalty
        )
        score += parts["overlong"]
    return RewardResult(score=score, parts=parts, prediction=prediction, correct=correct)


def _imported(spec: TermSpec) -> Callable[..., Any]:
    module_name, _, function_name = (spec.function or "").partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as problem:  # the user's module may raise anything when imported
        raise JobFileError(
            f"{spec.place}.function: {spec.function} cannot be imported: {_described(problem)}. "
            "The module must lie beside the job file, in the current folder, or be installed"
        ) from problem
    if not callable(function):
        raise JobFileError(f"{spec.place}.function: {spec.function} is not a function")
    called: Callable[..., Any] = function
    return called


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have none
        return None


def _checked_params(spec: TermSpec, function: Callable[..., Any]) -> dict[str, Any]:
    """``params`` of a built-in function as its keyword arguments."""
    if not spec.params:
        return {}
    # Not at the top: a worker process that needs no pydantic starts sooner.
    from rljob_trainer.rewards.parameters import ParameterError, keyword_arguments

    try:
        return keyword_arguments(function, spec.params)
    except ParameterError as bad:
        place = f"{spec.place}.params{f'.{bad.name}' if bad.name else ''}"
        raise JobFileError(f"{place}: {bad.problem}, for {spec.title}; {bad.remedy}") from None


def _check_pattern(spec: TermSpec) -> None:
    try:
        re.compile(str(spec.params.get("pattern", "")))
    except re.error as problem:
        raise JobFileError(f"{spec.place}.pattern: not a regular expression: {problem}") from problem


def _verdict(returned: Any) -> Verdict:
    """What a function returned: a number, or a mapping with ``score`` and perhaps ``prediction`` and ``correct``."""
    if isinstance(returned, Verdict):
        verdict = returned
    elif isinstance(returned, Mapping):
        if "score" not in returned:
            raise TypeError(
                f"it returned a mapping without 'score', only with {', '.join(map(repr, returned)) or 'nothing'}"
            )
        prediction, correct = returned.get("prediction"), returned.get("correct")
        verdict = Verdict(
            _number(returned["score"]),
            None if prediction is None else str(prediction),
            None if correct is None else bool(correct),
        )
    else:
        verdict = Verdict(_number(returned))
    if not math.isfinite(verdict.score):
        raise ValueError(f"it returned the score {verdict.score}, which is not a finite number")
    return verdict


def _number(value: Any) -> float:
    with contextlib.suppress(Exception):  # whatever its own conversion raises
        if not isinstance(value, str | bytes):
            return float(value)
    raise TypeError(
        f"it returned {reprlib.repr(value)} ({type(value).__name__}), which is not a number; return one, or a mapping "
        "with 'score'"
    )


def _described(problem: BaseException) -> str:
    """Type, message and the innermost line of an exception."""
    frames = traceback.extract_tb(problem.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(problem).__name__}: {problem}{where}"
