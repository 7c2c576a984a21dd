"""The terms of a job's reward: which function each one calls with what, and what comes out as a sample's score.

No processes here: ``Term.score`` calls the function, ``combine`` adds the terms up. The driver uses both for the
quick built-in rules, a worker process for the rest.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from rljob_trainer.episodes.episode import RewardResult
from rljob_trainer.errors import JobFileError, RewardWorkerError
from rljob_trainer.rewards.rules import RewardVerdict, TooSlowError, built_in, overlong, required_answer
from rljob_trainer.rewards.signatures import (
    OWN,
    Convention,
    Parameters,
    SignatureError,
    convention_of,
    trl_arguments,
    verl_arguments,
)
from rljob_trainer.rewards.verdicts import UnusableError, described_error, list_of_one, verdict_of

if TYPE_CHECKING:
    from rljob_api.spec.reward import Reward
    from rljob_trainer.episodes.identity import EpisodeId
    from rljob_trainer.world.sandbox import Sandbox


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
    conversation: Sequence[Mapping[str, Any]] = ()
    """The chat messages of an episode of many turns, the prompt's too."""
    returned: Any = None
    """What the environment's program has returned."""
    reference: Any = None
    """The cell that ``answer`` is the text of."""
    data_source: str | None = None
    """What the column ``data.train.sourceColumn`` says; None: there is none."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The chat messages that the model was asked with; empty without a chat template."""
    conversational: bool = False
    """The row's prompt is chat messages, and no text."""
    answers: int = 1
    """How often the model has spoken."""

    def digest(self) -> int:
        """32 bits of which sample this is and of its text."""
        return crc32(f"{self.label}\0{self.response}".encode("utf-8", "surrogatepass"))


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
class RewardFailure:
    """A term that gave no verdict on a sample."""

    term: str
    problem: str
    ended: bool = False
    """It hung or crashed, and its worker process is no more."""
    lost: bool = False
    """Its worker process was ended or stopped from outside, as far as can be told, twice in succession: neither
    function nor row need be at fault."""
    away: bool = False
    """What it asks (a judge) has not answered in time: function and row are not at fault."""
    gave_up: bool = False
    """A built-in function that would have taken too long ended by itself (``TooSlowError``)."""

    @property
    def hung(self) -> bool:
        """It hung or crashed on what it was given, which is nobody else's doing."""
        return (self.ended or self.gave_up) and not self.lost


Outcome = dict[str, RewardVerdict | RewardFailure | None]
"""What the terms said about one sample, by their names; None: a function of TRL's kind has nothing to say about it."""


class Term:
    """A term ready to be called."""

    def __init__(self, spec: TermSpec) -> None:
        """Imports the function. Raises ``JobFileError`` when that fails or the parameters don't fit."""
        self.spec = spec
        rule = None if spec.type == "custom" else built_in(spec.type)
        if spec.type != "custom" and rule is None:
            raise JobFileError(f"{spec.place}.type: there is no reward function {spec.type!r}")
        self.inline = rule is not None and rule.inline
        self.sandboxed = rule is not None and rule.sandboxed
        self._judged_by = rule.judged_by if rule else None
        self.hang_score = rule.hang_score if rule else None
        self._prepare = rule.prepare if rule else None
        self._function: Callable[..., Any] = rule.function if rule else _imported(spec)
        self.is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004  an object that is called as an async function is
        )
        self._params = dict(spec.params) if rule is None else _checked_params(spec, self._function)
        signature = _signature(self._function)
        self._takes_all = signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        self._names = frozenset(signature.parameters) if signature else frozenset()
        if not self._takes_all and (unknown := sorted(set(self._params) - self._names)):
            raise JobFileError(
                f"{spec.place}.params: {spec.title} has no parameter {', '.join(map(repr, unknown))}; "
                f"its parameters are {', '.join(sorted(self._names - set(OWN))) or 'none'}"
            )
        self._convention: Convention = "rljob"
        if rule is None and signature is not None:
            self._convention = _convention(spec, signature)
        if spec.type == "pattern":
            _check_pattern(spec)
        if spec.type == "jsonSchema":
            _check_schema(spec, self._params)
        self._wanted_standard = tuple(n for n in OWN if self._takes_all or n in self._names)
        self._wants_columns = self._takes_all or bool(self._names - set(OWN) - set(self._params))

    async def score_in(self, sandbox: Sandbox, response: Response) -> RewardVerdict | RewardFailure | None:
        """Scores by a function that runs programs. Raises ``RewardWorkerError`` when the sandbox fails."""
        try:
            reference = self._reference(response)
            returned = await self._function(sandbox, response.response, reference, **self._params)
        except RewardWorkerError as failed:
            raise RewardWorkerError(
                f"reward function {self.spec.title} on {response.label or 'a sample'}: {failed}"
            ) from failed
        except Exception as problem:  # noqa: BLE001  a row's tests may be anything
            return RewardFailure(self.spec.name, described_error(problem))
        return self._judged(returned, response)

    def _reference(self, response: Response) -> Any:
        """The cell that a sandboxed function judges by. Raises ``ValueError`` where the row has none."""
        if self._judged_by is None:
            return required_answer(response.answer) if response.reference is None else response.reference
        if self._judged_by not in response.columns:
            raise ValueError(f"the row has no column {self._judged_by!r}: its data source does not fit this function")
        return response.columns[self._judged_by]

    @property
    def params(self) -> Mapping[str, Any]:
        """What the job sets, by the names of the function's parameters."""
        return self._params

    def prepare(self) -> None:
        """Does what would make the first call slow."""
        if self._prepare is not None:
            self._prepare()

    def applies_to(self, source: str) -> bool:
        return self.spec.applies_to(source)

    def score(self, response: Response) -> RewardVerdict | RewardFailure | None:
        """Calls a function that is not async. Whatever it raises becomes a ``RewardFailure`` that says where; None: it
        says nothing about this sample."""
        try:
            returned = self._function(**self._arguments(response))
        except TooSlowError as slow:
            return RewardFailure(self.spec.name, str(slow), gave_up=True)
        except BaseException as problem:  # noqa: BLE001  also KeyboardInterrupt and CancelledError, raised by the function
            return RewardFailure(self.spec.name, described_error(problem))
        return self._judged(returned, response)

    async def score_async(self, response: Response) -> RewardVerdict | RewardFailure | None:
        """Scores like ``score``, by an async function. Whoever awaits it in a task of its own and cancels that task
        must not expect it to end as cancelled."""
        try:
            called: Awaitable[Any] = self._function(**self._arguments(response))
            returned = await called
        except BaseException as problem:  # noqa: BLE001  as in score
            return RewardFailure(self.spec.name, described_error(problem))
        return self._judged(returned, response)

    def _judged(self, returned: Any, response: Response) -> RewardVerdict | RewardFailure | None:
        """What was returned as a verdict, or what is wrong with it."""
        try:
            if self._convention == "trl":
                (returned,) = list_of_one(returned)
                if returned is None:
                    return None
            verdict = verdict_of(returned, of_verl=self._convention == "verl")
            if len(verdict.turns) > response.answers:
                raise UnusableError(
                    f"it returned {len(verdict.turns)} turn_rewards for an episode with {response.answers} answers"
                )
            return verdict
        except UnusableError as problem:
            return RewardFailure(self.spec.name, str(problem))
        except BaseException as problem:  # noqa: BLE001  what conversions of the user's types raise
            return RewardFailure(self.spec.name, f"its return value cannot be used: {described_error(problem)}")

    def _arguments(self, response: Response) -> dict[str, Any]:
        if self._convention != "rljob":
            given = verl_arguments(response) if self._convention == "verl" else trl_arguments(response)
            wanted = given if self._takes_all else {name: given[name] for name in given if name in self._names}
            return {**wanted, **self._params}
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
                f"{spec.place}.name: {spec.name!r} appears twice; give each reward function its own name"
            )
    return specs


@dataclass(frozen=True, slots=True)
class OverlongSettings:
    """DAPO's soft punishment, with the run's longest response."""

    longest: int
    buffer: int
    penalty: float


def combine(
    specs: Sequence[TermSpec],
    outcome: Outcome,
    tokens: int,
    punishment: OverlongSettings | None,
    of: tuple[EpisodeId, int] | None = None,
) -> RewardResult:
    """The weighted sum of the verdicts (all must be there), with the parts unweighted.

    Prediction and correctness are those of the first term, in the job file's order, that knows them.
    """
    parts: dict[str, float] = {}
    details: dict[str, float] = {}
    turns: list[float] = []
    score = 0.0
    prediction: str | None = None
    correct: bool | None = None
    for spec in specs:
        verdict = outcome.get(spec.name)
        if verdict is None:
            continue
        assert isinstance(verdict, RewardVerdict)
        parts[spec.name] = verdict.score
        for name, value in verdict.details.items():
            details[f"{spec.name}.{name}"] = value
        score += spec.weight * verdict.score
        if verdict.turns:
            both = zip_longest(turns, verdict.turns, fillvalue=0.0)
            turns = [before + spec.weight * earned for before, earned in both]
        prediction = verdict.prediction if prediction is None else prediction
        correct = verdict.correct if correct is None else correct
    if punishment is not None:
        parts["overlong"] = overlong(
            tokens, longest=punishment.longest, buffer=punishment.buffer, penalty=punishment.penalty
        )
        score += parts["overlong"]
    return RewardResult(score, parts, prediction, correct, of=of, turns=tuple(turns), details=details)


def _imported(spec: TermSpec) -> Callable[..., Any]:
    module_name, _, function_name = (spec.function or "").partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except BaseException as problem:  # the user's module may raise anything when imported
        raise JobFileError(
            f"{spec.place}.function: {spec.function} cannot be imported: {described_error(problem)}{_absent(problem)}"
        ) from problem
    if not callable(function):
        raise JobFileError(f"{spec.place}.function: {spec.function} is not a function")
    called: Callable[..., Any] = function
    return called


def _absent(problem: BaseException) -> str:
    """Where a module has to be that an import did not find: the one of the function, or one that this imports."""
    if not isinstance(problem, ModuleNotFoundError) or not problem.name:
        return ""
    return f". {problem.name} must be beside the job file, in the current folder, or installed"


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # some C functions have none
        return None


def _convention(spec: TermSpec, signature: inspect.Signature) -> Convention:
    by_name = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    optional = frozenset(p.name for p in by_name if p.default is not p.empty)
    try:
        return convention_of(Parameters(tuple(p.name for p in by_name), optional), spec.params)
    except SignatureError as error:
        raise JobFileError(f"{spec.place}.function: {spec.title} {error.problem}; {error.remedy}") from None


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
    except (re.error, OverflowError, RecursionError) as problem:
        raise JobFileError(f"{spec.place}.pattern: not a regular expression: {problem}") from problem


def _check_schema(spec: TermSpec, params: Mapping[str, Any]) -> None:
    from rljob_trainer.rewards.json_schema import check_schema_params

    try:
        check_schema_params(params)
    except ValueError as problem:
        raise JobFileError(f"{spec.place}.params: {problem}") from None
