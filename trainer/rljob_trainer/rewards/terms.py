"""The terms of a job's reward: which function each one calls with what, and what comes out as a sample's score.

No processes here: ``Term.score`` calls the function, ``combine`` adds the terms up. The driver uses both for the
quick built-in rules, a worker process for the rest.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import numbers
import re
import reprlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
from rljob_trainer.texts import writable

if TYPE_CHECKING:
    from rljob_api.spec.reward import Reward
    from rljob_trainer.world.sandbox import Sandbox


LARGEST_SCORE = 1e15
"""Training computes in float32, whose largest number is 3.4e38, with squares and sums of the scores of a batch: those
of 10^8 samples of this size are still finite."""
MOST_DETAILS = 32
"""Numbers that a function may return besides a sample's score: each is a metric."""
_LONGEST_NAME = 64
_LONGEST_PREDICTION = 16384
_LONGEST_MESSAGE = 2000
"""Characters of what a function says of itself: a prediction is kept in every sample, a message in the log."""


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
                f"{spec.place}.params: {spec.title} takes no {', '.join(map(repr, unknown))}; "
                f"it takes {', '.join(sorted(self._names - set(OWN))) or 'none'}"
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
        reference = response.answer if response.reference is None else response.reference
        try:
            if reference is None:
                required_answer(None)
            returned = await self._function(sandbox, response.response, reference, **self._params)
        except RewardWorkerError as failed:
            raise RewardWorkerError(
                f"reward function {self.spec.title} on {response.label or 'a sample'}: {failed}"
            ) from failed
        except Exception as problem:  # noqa: BLE001  a row's tests may be anything
            return RewardFailure(self.spec.name, _described(problem))
        return self._judged(returned)

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
            return RewardFailure(self.spec.name, _described(problem))
        return self._judged(returned)

    async def score_async(self, response: Response) -> RewardVerdict | RewardFailure | None:
        """Scores like ``score``, by an async function. Whoever awaits it in a task of its own and cancels that task
        must not expect it to end as cancelled."""
        try:
            called: Awaitable[Any] = self._function(**self._arguments(response))
            returned = await called
        except BaseException as problem:  # noqa: BLE001  as in score
            return RewardFailure(self.spec.name, _described(problem))
        return self._judged(returned)

    def _judged(self, returned: Any) -> RewardVerdict | RewardFailure | None:
        """What was returned as a verdict, or what is wrong with it."""
        try:
            if self._convention == "trl":
                (returned,) = _list_of_one(returned)
                if returned is None:
                    return None
            return _verdict(returned, of_verl=self._convention == "verl")
        except _UnusableError as problem:
            return RewardFailure(self.spec.name, str(problem))
        except BaseException as problem:  # noqa: BLE001  what conversions of the user's types raise
            return RewardFailure(self.spec.name, f"what it returned cannot be used: {_described(problem)}")

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
    details: dict[str, float] = {}
    score = 0.0
    prediction: str | None = None
    correct: bool | None = None
    for spec in specs:
        verdict = outcome.get(spec.name)
        if verdict is None:
            continue
        assert isinstance(verdict, RewardVerdict)
        parts[spec.name] = verdict.score
        details.update((f"{spec.name}.{name}", value) for name, value in verdict.details.items())
        score += spec.weight * verdict.score
        prediction = verdict.prediction if prediction is None else prediction
        correct = verdict.correct if correct is None else correct
    if punishment is not None:
        parts["overlong"] = overlong(
            tokens, longest=punishment.longest, buffer=punishment.buffer, penalty=punishment.penalty
        )
        score += parts["overlong"]
    return RewardResult(score=score, parts=parts, details=details, prediction=prediction, correct=correct)


def _imported(spec: TermSpec) -> Callable[..., Any]:
    module_name, _, function_name = (spec.function or "").partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except BaseException as problem:  # the user's module may raise anything when imported
        raise JobFileError(
            f"{spec.place}.function: {spec.function} cannot be imported: {_described(problem)}{_absent(problem)}"
        ) from problem
    if not callable(function):
        raise JobFileError(f"{spec.place}.function: {spec.function} is not a function")
    called: Callable[..., Any] = function
    return called


def _absent(problem: BaseException) -> str:
    """Where a module has to be that an import did not find: the one of the function, or one that this imports."""
    if not isinstance(problem, ModuleNotFoundError) or not problem.name:
        return ""
    return f". {problem.name} must lie beside the job file, in the current folder, or be installed"


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


class _UnusableError(Exception):
    """What a function returned is no verdict; the message says why."""


def _list_of_one(returned: Any) -> list[Any]:
    """What a function of TRL's kind returned for one sample."""
    if isinstance(returned, str | bytes | Mapping):
        raise _UnusableError(f"it returned {_shown(returned)} ({_type_name(returned)}); {_A_LIST}")
    try:
        values = list(returned)
    except TypeError:
        raise _UnusableError(f"it returned {_shown(returned)} ({_type_name(returned)}); {_A_LIST}") from None
    if len(values) != 1:
        raise _UnusableError(f"it returned {len(values)} rewards for 1 completion; {_A_LIST}")
    return values


_A_LIST = "a function that takes completions returns a list with a number, or None, for each of them"


def _verdict(returned: Any, *, of_verl: bool = False) -> RewardVerdict:
    """What a function returned: a number, or a mapping with ``score`` and perhaps ``prediction`` and ``correct``, which
    verl calls ``pred`` and ``acc``. Its other numbers are details.

    All that is in it are plain numbers and texts afterwards, which can travel: nothing of the user's types.
    """
    details: dict[str, float] = {}
    if isinstance(returned, RewardVerdict):
        score, prediction, correct, details = (
            returned.score,
            returned.prediction,
            returned.correct,
            dict(returned.details),
        )
    elif isinstance(returned, Mapping):
        if "score" not in returned:
            names = reprlib.repr(list(returned))[1:-1] if returned else "nothing"
            raise _UnusableError(f"it returned a mapping without 'score', only with {plain_text(names)}")
        said = ("pred", "acc") if of_verl else ("prediction", "correct")
        score, prediction, correct = returned["score"], *map(returned.get, said)
        if of_verl and correct not in (0, 1):
            correct = None
        details = _details(returned, {"score", *said[: 1 if of_verl and correct is None else 2]})
    else:
        score, prediction, correct = returned, None, None
    return RewardVerdict(
        _number(score),
        None if prediction is None else _kept_prediction(plain_text(str(prediction))),
        None if correct is None else bool(correct),
        details,
    )


def _details(returned: Mapping[Any, Any], taken: Collection[str]) -> dict[str, float]:
    """The finite numbers of a mapping but for those that are taken. Raises ``_UnusableError`` for more than can be
    metrics."""
    found: dict[str, float] = {}
    for name, value in returned.items():
        if isinstance(name, str) and name not in taken and isinstance(value, numbers.Real):
            number = float(value)
            if math.isfinite(number) and abs(number) <= LARGEST_SCORE:
                found[plain_text(name)[:_LONGEST_NAME]] = number
    if len(found) > MOST_DETAILS:
        raise _UnusableError(f"it returned {len(found)} numbers besides the score; at most {MOST_DETAILS} are kept")
    return found


def _kept_prediction(text: str) -> str:
    """A prediction is compared with others and written beside its sample. Of one as long as a book the beginning is
    kept and a digest of the whole, so that equal predictions stay equal and others do not become so."""
    if len(text) <= _LONGEST_PREDICTION:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text[:_LONGEST_MESSAGE]}... ({len(text)} characters, SHA-256 {digest})"


def _number(value: Any) -> float:
    """Raises ``_UnusableError`` for what is no number that training can hold."""
    number: float | None = None
    if not isinstance(value, str | bytes | bytearray):
        try:
            number = float(value)
        except OverflowError:  # of whole numbers and fractions beyond a float's range
            raise _UnusableError(f"it returned a score ({_type_name(value)}) {_TOO_LARGE}") from None
        except BaseException:  # noqa: BLE001  whatever its own conversion raises
            number = None
    if number is None:
        raise _UnusableError(
            f"it returned {_shown(value)} ({_type_name(value)}), which is not a number; return one, or a mapping with "
            "'score'"
        )
    if not math.isfinite(number):
        raise _UnusableError(f"it returned the score {number}, which is not a finite number")
    if abs(number) > LARGEST_SCORE:
        raise _UnusableError(f"it returned the score {number:g}, {_TOO_LARGE}")
    return number


_TOO_LARGE = f"beyond +-{LARGEST_SCORE:g}: training computes in float32, with squares and sums of scores; scale it down"


def too_large(result: RewardResult) -> str | None:
    """What is wrong with the weighted sum of terms that are each small enough; None: nothing."""
    if abs(result.score) <= LARGEST_SCORE:
        return None
    return f"the weighted sum of its rewards is {result.score:g}, {_TOO_LARGE}, or lower the weights"


def _type_name(value: Any) -> str:
    # Of the class itself: an instance may say anything of its own class.
    return plain_text(type.__dict__["__name__"].__get__(type(value)))


def _shown(value: Any) -> str:
    """A value as messages show it, whatever its ``__repr__`` does."""
    try:
        return plain_text(reprlib.repr(value))
    except BaseException:  # noqa: BLE001
        return "a value that cannot be shown"


def plain_text(text: str) -> str:
    """A text of the user's code that can travel and be written: of class ``str`` itself, without lone surrogates."""
    return writable(str.__str__(text))


def _described(problem: BaseException) -> str:
    """Type, message and the innermost line of an exception, whatever its ``__str__`` does."""
    try:
        message = plain_text(str(problem))
    except BaseException as another:  # noqa: BLE001
        message = f"(its text cannot be read: that raises {_type_name(another)})"
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[:_LONGEST_MESSAGE]}... ({len(message)} characters)"
    # Not traceback.extract_tb, which reads source files: the line's number is all that is wanted.
    trace = problem.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({plain_text(trace.tb_frame.f_code.co_filename)}, line {trace.tb_lineno})" if trace else ""
    return f"{_type_name(problem)}: {message}{where}"
