"""One run of an environment's program: what it asks the model and the world, over the record of what it did before."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import operator
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, Protocol

from rljob_trainer.episodes.conversation import Asked, Conversation, Message, Rendered
from rljob_trainer.episodes.curfew import Curfew, EpisodeOverError, NoRoomError
from rljob_trainer.episodes.environment import Task
from rljob_trainer.episodes.episode import Episode, FinishReason, Leaf, observed_experts
from rljob_trainer.episodes.log import CallLog
from rljob_trainer.episodes.receipts import prompt_digest
from rljob_trainer.episodes.record import (
    ASK,
    CallPlace,
    DivergedError,
    EpisodeRecord,
    RecordedCall,
    RecordedTurn,
    What,
    of_arguments,
)
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult
from rljob_trainer.episodes.tokens import NOTHING, Tokens
from rljob_trainer.errors import ProgramError, WorldFailedError
from rljob_trainer.world.protocol import Json, WorldError, WorldGoneError, failure_of_the_world

_PAUSE_SECONDS = 1.0
"""Before a call that met a failure of the world is made again; twice as long each time."""
_DEAF = 100
"""How often a program may ask on when its episode is over."""
LONG_TEXT = 1 << 16
"""Characters that are tokenised in a thread, since that takes 30 ms and more."""
_ENDED = "the episode's program has ended"
_log = logging.getLogger(__name__)
_SAID: Mapping[str, Callable[[Any], Any]] = {"prediction": str, "correct": bool}
_key: contextvars.ContextVar[str] = contextvars.ContextVar("key of the call under way")


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """How far an episode goes."""

    turns: int
    """Answers of the model."""
    prompt_tokens: int
    """Longest prompt. What follows it is bounded by the task's ``sampling.max_tokens``, observations too."""
    turn_tokens: int | None = None
    """Longest answer; None: what is left."""
    vocabulary: int | None = None
    """Token ids are below it; None: that is not looked at."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said in one turn."""

    context: tuple[int, ...]
    """Everything that it saw, and what it said."""
    said: tuple[int, ...]
    finish: FinishReason
    text: str = ""
    """What it said, without special tokens."""
    message: Message = field(default_factory=dict)
    """What it said, as the chat's next message; empty where token ids were asked for."""
    tokens: Tokens = NOTHING
    """What it said, with its log-probs and versions."""


class _UnderWay(NamedTuple):
    """A call that has not returned."""

    kind: str
    since: float
    task: asyncio.Task[Any] | None
    """That waits for it."""


class _CallsUnderWay:
    """The calls of one episode that have not returned, the oldest first."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.Future[None], _UnderWay] = {}

    @contextmanager
    def one(self, kind: str) -> Iterator[None]:
        """While a call is made."""
        done = asyncio.get_running_loop().create_future()
        self._calls[done] = _UnderWay(kind, time.monotonic(), asyncio.current_task())
        try:
            yield
        finally:
            del self._calls[done]
            done.set_result(None)

    def __iter__(self) -> Iterator[_UnderWay]:
        return iter(self._calls.values())

    def cancel(self) -> None:
        for call in self:
            if call.task is not None:
                call.task.cancel()

    async def over(self) -> None:
        while self._calls:
            await asyncio.wait(list(self._calls))


class AskedModel(Protocol):
    """Answers one request of one episode."""

    async def ask(self, request: GenerationRequest) -> GenerationResult: ...


class Play:
    """One run of an episode's program over its record."""

    def __init__(
        self,
        task: Task,
        record: EpisodeRecord,
        log: CallLog,
        model: AskedModel,
        conversation: Conversation,
        decode: Callable[[Sequence[int]], str],
        limits: EpisodeLimits,
        tries: int,
    ) -> None:
        self.task = task
        self.conversation = conversation
        self.curfew = Curfew()
        """Ends it when its group is to be trained."""
        self.made: set[CallPlace] = set()
        self.fault: Exception | None = None
        """What ended a call that is no matter of the program's: of the engines, of the world, of the record."""
        self._record, self._log, self._model, self._tries = record, log, model, tries
        self._decode, self._limits = decode, limits
        self._leaves: list[Leaf] = []
        self._answered: list[tuple[int, int]] = []
        """Of each answer, in the order in which they came, its leaf and its number there."""
        self._asked_in: set[tuple[str, ...]] = set()
        """Branches that have asked the model."""
        self._numbers: Counter[tuple[str, ...]] = Counter()
        """Of calls so far, by branch."""
        self._asking, self.calling = _CallsUnderWay(), _CallsUnderWay()
        self._since = time.monotonic()
        self._over = self._closed = False
        """Nothing new may begin; what is under way does not count either."""
        self._turns = self._world_calls = 0
        self._seconds = self._world_seconds = 0.0
        self._finish: FinishReason = "stop"
        self._refused = 0

    @property
    def has_asked(self) -> bool:
        """Whether there is something to train on, or will be."""
        return bool(self._leaves or self.curfew.asking)

    async def ask(self, place: CallPlace, context: Sequence[int], max_tokens: int | None) -> Answer:
        ids = tuple(map(operator.index, context))
        if not ids:
            raise ValueError("the context for the model is empty; pass at least one token")
        if min(ids) < 0 or (self._limits.vocabulary is not None and max(ids) >= self._limits.vocabulary):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"the context has token id {wrong}, but the model has {self._limits.vocabulary} tokens")
        if max_tokens is not None and operator.index(max_tokens) < 1:
            raise ValueError(f"max_tokens is {max_tokens}, but must be at least 1")
        kind = ASK if max_tokens is None else f"{ASK} for {max_tokens} tokens"
        room = await self._room(ids)
        call = self._at(place, what := What(kind, prompt_digest(ids)))
        self._turns += 1
        self._asked_in.add(place.branch[:-1])
        if call is not None and call.turn is not None:
            turn = call.turn
            self._add(ids, turn)
        else:
            most = min([room, *(limit for limit in (max_tokens, self._limits.turn_tokens) if limit is not None)])
            sampling = replace(self.task.sampling, max_tokens=most)
            with self._asking.one(kind):
                result = await self._ask(self.task.request(place.turn, ids, sampling))
                tokens = self._with_what_is_new(ids, result.tokens)
                turn = RecordedTurn(tokens, result.finish, result.seconds, result.receipt)
                self._put(RecordedCall(place, what, True, turn=turn))
                self._add(ids, turn)
            self._since = time.monotonic()
        said = tuple(turn.tokens.ids.tolist())
        return Answer((*ids, *said), said, turn.finish, self._decode(said), tokens=turn.tokens)

    def place_to_ask(self, branch: tuple[str, ...]) -> CallPlace:
        """Of the next answer. Before anything is awaited: the order in which a program asks is that of its calls."""
        return self._next_place((*branch, ASK))

    async def tokenised(self, rendered: Rendered) -> Asked:
        """What the model is asked. Text that has no room is not tokenised at all, and long text in a thread: all other
        episodes would wait for it. Raises ``EpisodeOverError``."""
        if len(rendered.new) <= LONG_TEXT:
            return self.conversation.tokenised(rendered)
        if self._over:
            raise EpisodeOverError(_ENDED)
        least = self.conversation.least_tokens(rendered)
        if least >= self._limits.prompt_tokens + self.task.sampling.max_tokens:
            await self._has_no_room(f"at least {least}")
        return await asyncio.to_thread(self.conversation.tokenised, rendered)

    def _next_place(self, branch: tuple[str, ...]) -> CallPlace:
        number = self._numbers[branch]
        self._numbers[branch] += 1
        return CallPlace(branch, number)

    def cut(self) -> None:
        """The program has not come to its end."""
        self._finish = "length"

    async def end(self) -> None:
        """The program has ended, and may have left calls under way to other tasks. What the model was asked it answers,
        so that the episode does not depend on who is faster; calls of the world are given up."""
        self._over = True
        self.calling.cancel()
        await self._asking.over()
        self._closed = True

    def give_up(self) -> None:
        """Nothing counts any more that the program has left under way."""
        self._over = self._closed = True
        self.calling.cancel()
        self._asking.cancel()

    @property
    def is_asking(self) -> bool:
        """Whether the model is at an answer."""
        return any(self._asking)

    @property
    def idle_since(self) -> float | None:
        """Since when the program has been at something of its own; None: it has asked or called somebody."""
        return None if any(self._asking) or any(self.calling) else self._since

    async def _room(self, context: tuple[int, ...]) -> int:
        """How long an answer may be. Raises ``EpisodeOverError`` when there is to be none."""
        if self._over:
            raise EpisodeOverError(_ENDED)
        longest = self.task.sampling.max_tokens
        room = 0 if self.curfew.is_over else self._limits.prompt_tokens + longest - len(context)
        if (place := self._continued(context)) is not None:
            room = min(room, longest - (len(context) - len(self._leaves[place].prompt_ids)))
        if self._turns < self._limits.turns and room > 0:
            return min(room, longest)
        if room <= 0:
            await self._has_no_room(str(len(context)))
        await self._refuse()
        self._finish = "length"
        self.curfew.check()
        raise EpisodeOverError(f"the episode has used its {self._limits.turns} turns")

    async def _has_no_room(self, tokens: str) -> NoReturn:
        if not self._leaves:
            self.fault = ProgramError(
                f"{self.task.id}: the first context of the environment's program has {tokens} tokens, which leaves no "
                f"room for an answer; raise spec.data.maxPromptTokens = {self._limits.prompt_tokens}"
            )
            raise self.fault
        await self._refuse()
        self._finish = "length"
        self.curfew.check()
        raise NoRoomError("the episode has no tokens left")

    async def _refuse(self) -> None:
        """Nothing more is to be asked. Raises ``ProgramError`` for a program that does not take that in."""
        self._refused += 1
        if self._refused > _DEAF:
            self.fault = ProgramError(
                f"{self.task.id}: its program or agent was told {_DEAF} times that the episode is over and asks again; "
                "let EpisodeOverError propagate, or end when a request is refused with episode_over"
            )
            raise self.fault
        await asyncio.sleep(0)

    async def _ask(self, request: GenerationRequest) -> GenerationResult:
        try:
            with self.curfew.question():
                return await self._model.ask(request)
        except Exception as error:
            self.fault = error
            raise

    async def call(
        self,
        branch: tuple[str, ...],
        kind: str,
        function: Callable[..., Awaitable[Json]],
        arguments: tuple[Json, ...],
    ) -> Json:
        if self._over:
            raise EpisodeOverError(_ENDED)
        if self.curfew.is_over:
            await self._refuse()
        with self.curfew.call():
            return await self._call(self._next_place(branch), kind, function, arguments)

    async def _call(
        self, place: CallPlace, kind: str, function: Callable[..., Awaitable[Json]], arguments: tuple[Json, ...]
    ) -> Json:
        recorded = self._at(place, what := What(kind, of_arguments(arguments)))
        if recorded is not None and recorded.done:
            self._called(recorded.seconds)
            return recorded.result
        began = time.monotonic()
        with self.calling.one(kind):
            if recorded is None:
                self._put(RecordedCall(place, what))
                await self._synced()
            # With the digest of the arguments: after a roll-back the same place may hold another call.
            _key.set(
                "/".join(map(str, (*self.task.id[:3], *place.branch, place.number, kind, f"{what.arguments:08x}")))
            )
            result = await self._patiently(place, kind, function, arguments)
            plain = json.dumps(result)
            self._put(RecordedCall(place, what, True, json.loads(plain), time.monotonic() - began))
            self._called(time.monotonic() - began)
        self._since = time.monotonic()
        # As it will be when the program is run again: a tuple has become a list by then.
        return json.loads(plain)

    def _called(self, seconds: float) -> None:
        self._world_calls, self._world_seconds = self._world_calls + 1, self._world_seconds + seconds

    def episode(self, returned: Any) -> Episode:
        """What it came to. Raises ``ProgramError`` for a program that never asked the model."""
        if not self._leaves:
            raise ProgramError(f"{self.task.id}: the environment's program ended without an answer from the model")
        return Episode(
            self.task.id,
            list(self._leaves),
            "deadline" if self.curfew.has_cut else self._finish,
            seconds=self._seconds,
            world_calls=self._world_calls,
            world_seconds=self._world_seconds,
            made_for=self.task.prompt.token_ids,
            returned=self._plain(returned),
            messages=self.conversation.messages,
        )

    def _plain(self, returned: Any) -> Any:
        """What the program has returned as plain data, which can travel. Raises ``ProgramError`` for anything else."""
        try:
            if isinstance(returned, Mapping):
                turns = returned.get("turn_rewards")
                score = _number(returned["score"] if turns is None else returned.get("score", 0.0))
                others = {name: returned[name] for name in ("prediction", "correct") if returned.get(name) is not None}
                said = {"score": score, **{name: _SAID[name](value) for name, value in others.items()}}
                return said if turns is None else said | {"turn_rewards": self._in_place(list(map(_number, turns)))}
            return None if returned is None else _number(returned)
        except Exception as error:  # of whatever the user's types do
            raise ProgramError(
                f"{self.task.id}: the environment's program returned {type(returned).__name__}, which is not a reward "
                f"({type(error).__name__}: {error}); return a number, or a mapping with score and optionally "
                "prediction, correct and turn_rewards"
            ) from error

    def _in_place(self, earned: list[float]) -> list[float]:
        """What each answer has earned, from the order in which they came to that in which they stand in the leaves."""
        if len(self._asked_in) > 1:
            raise ValueError("turn_rewards need an order of answers, but the program asks in parallel branches")
        if len(earned) > len(self._answered):
            raise ValueError(f"{len(earned)} turn_rewards for {len(self._answered)} answers of the model")
        of_answer = dict(zip(self._answered, earned, strict=False))
        return [of_answer.get(place, 0.0) for place in sorted(self._answered)]

    def _put(self, call: RecordedCall) -> None:
        if self._closed:
            raise EpisodeOverError(_ENDED)
        try:
            self._log.put(self.task.id, call)
        except OSError as error:
            self.fault = error
            raise

    async def _synced(self) -> None:
        try:
            await asyncio.wrap_future(self._log.synced())
        except OSError as error:
            self.fault = error
            raise

    def _at(self, place: CallPlace, what: What) -> RecordedCall | None:
        self.made.add(place)
        try:
            return self._record.at(place, what)
        except DivergedError as error:
            self.fault = error
            raise

    async def _patiently(
        self, place: CallPlace, kind: str, function: Callable[..., Awaitable[Json]], arguments: tuple[Json, ...]
    ) -> Json:
        for attempt in range(self._tries):
            try:
                return await function(*arguments)
            except (WorldError, BaseExceptionGroup) as raised:
                error = failure_of_the_world(raised)
                if error is None:
                    raise
                if attempt + 1 == self._tries or isinstance(error, WorldGoneError):
                    self.fault = WorldFailedError(
                        f"{self.task.id}: {kind} ({place}) failed {attempt + 1} times, the last time with: {error}. "
                        "The episode has no reward; start again when the called service is available"
                    )
                    raise self.fault from error
                _log.warning("%s: %s failed and is called again: %s", self.task.id, kind, error)
                await asyncio.sleep(_PAUSE_SECONDS * 2**attempt)
        raise AssertionError

    def _continued(self, context: tuple[int, ...]) -> int | None:
        """The leaf that a context begins with, the latest one if there are several."""
        for place, leaf in reversed(list(enumerate(self._leaves))):
            start, length = len(leaf.prompt_ids), len(leaf.prompt_ids) + len(leaf.tokens)
            if context[:start] == leaf.prompt_ids and context[start:length] == tuple(leaf.tokens.ids.tolist()):
                return place
        return None

    def _with_what_is_new(self, context: tuple[int, ...], answer: Tokens) -> Tokens:
        """An answer that continues a leaf, without what its engine says of the leaf's own tokens: each turn would keep
        it once more."""
        place = self._continued(context)
        if place is None or answer.prompt_experts is None:
            return answer
        leaf = self._leaves[place]
        experts = observed_experts(context[len(leaf.prompt_ids) + len(leaf.tokens) :], answer)
        return replace(answer, prompt_experts=experts if len(experts) else None)

    def _add(self, context: tuple[int, ...], turn: RecordedTurn) -> None:
        """A turn continues the leaf that its context begins with; else it begins another."""
        self._finish, self._seconds = turn.finish, self._seconds + turn.seconds
        place = self._continued(context)
        if place is None:
            self._answered.append((len(self._leaves), 0))
            self._leaves.append(Leaf(context, turn.tokens, turn.receipt))
            return
        leaf = self._leaves[place]
        self._answered.append((place, len(leaf.turns)))
        version = int(leaf.tokens.versions[-1]) if len(leaf.tokens) else 0
        observed = Tokens.given(context[len(leaf.prompt_ids) + len(leaf.tokens) :], version, like=turn.tokens)
        self._leaves[place] = leaf.continued(observed, turn.tokens, turn.receipt)


class Voice:
    """The model, to one episode's program."""

    def __init__(self, play: Play, branch: tuple[str, ...] = ()) -> None:
        self._play = play
        self._branch = branch

    def branch(self, name: str) -> Voice:
        """For turns that the program asks for beside other calls."""
        return Voice(self._play, (*self._branch, name))

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None, max_tokens: int | None = None
    ) -> Answer:
        """The model's answer to chat ``messages`` (``role``, ``content``). To go on, give it all of them again with
        ``answer.message`` and what is new behind them; then the model sees the very tokens that it has said.

        ``tools``: JSON schemas of functions, for the chat template. ``max_tokens`` as for ``ask``. Raises
        ``EpisodeOverError``, ``EngineError``, and ``ValueError`` where no chat template renders the messages.
        """
        play = self._play
        rendered = play.conversation.rendered(messages, tools)
        place = play.place_to_ask(self._branch)
        asked = await play.tokenised(rendered)
        answer = await play.ask(place, asked.ids, max_tokens)
        return replace(answer, message=play.conversation.answered(asked, answer.said))

    async def ask(self, context: Sequence[int], *, max_tokens: int | None = None) -> Answer:
        """The model's answer to the token ids ``context``, everything that it is to see, in at most as many tokens as
        the job leaves (or ``max_tokens``, if that is less). Raises ``EpisodeOverError`` and ``EngineError``."""
        return await self._play.ask(self._play.place_to_ask(self._branch), context, max_tokens)


class Calls:
    """The world, to one episode's program."""

    def __init__(self, play: Play, branch: tuple[str, ...] = ()) -> None:
        self._play = play
        self._branch = branch

    @property
    def seed(self) -> int:
        return self._play.task.world_seed

    @property
    def key(self) -> str:
        return _key.get()

    def branch(self, name: str) -> Calls:
        return Calls(self._play, (*self._branch, name))

    async def call(self, kind: str, function: Callable[..., Awaitable[Json]], *arguments: Json) -> Json:
        return await self._play.call(self._branch, kind, function, arguments)


def _number(score: Any) -> float:
    if isinstance(score, str | bytes | bytearray):  # as for any other reward
        raise TypeError("text is not a number")
    return float(score)
