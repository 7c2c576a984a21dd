"""Episodes of many turns: programs that ask the model and call the world, and go on after a kill. docs/episodes.md.

    async def episode(task: Task, model: Voice, world: World) -> None:
        answer = await model.ask(task.prompt.token_ids)
        result = await world.call("add", add, 2, 2)
        await model.ask([*answer.context, *encode(result)])

    environment = Programs(episode, log)

A program may catch what it likes: what it must not go on from is raised again when it has ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import logging
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from rljob_trainer.episodes.environment import LanguageModel, Task
from rljob_trainer.episodes.episode import Episode, FinishReason, Leaf
from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.log import CallLog, EpisodeLog, Unrecorded
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
from rljob_trainer.episodes.requests import BegunTurn, GenerationRequest, GenerationResult
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.errors import UnreachableError
from rljob_trainer.world.protocol import Json, World, WorldError

Program = Callable[[Task, "Voice", World], Awaitable[None]]
_PAUSE_SECONDS = 1.0
"""Before a call that met a failure of the world is made again; twice as long each time."""
_LOUD_SHARE = 0.01
"""Of the episodes that went on from a record: if more than that begin anew, it is said at once and not only counted."""
_log = logging.getLogger(__name__)
_key: contextvars.ContextVar[str] = contextvars.ContextVar("key of the call under way")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said in one turn."""

    context: tuple[int, ...]
    """Everything that it saw, and what it said."""
    said: tuple[int, ...]
    finish: FinishReason


class Programs:
    """The environment of one program."""

    def __init__(self, program: Program, log: EpisodeLog, *, tries: int = 4) -> None:
        """``log`` keeps the calls of episodes that are trained on. ``tries``: how often a call is made that meets a
        failure of the world, before the run ends."""
        self._program = program
        self._log = log
        self._tries = tries
        self._named = named(program)
        self.continued = 0
        self.diverged = 0
        """Episodes that went on from a record, and those of them that began anew."""

    async def play(
        self, tasks: Sequence[Task], model: LanguageModel, ended: Callable[[int, Episode], None] | None = None
    ) -> list[Episode]:
        siblings = Siblings(model)
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._play(task, siblings)) for task in tasks]
                if ended is not None:
                    for position, episode in enumerate(running):
                        episode.add_done_callback(functools.partial(_tell, ended, position))
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        return [episode.result() for episode in running]

    def kept(self, episode: Episode) -> dict[EpisodeId, BegunTurn]:
        """Nothing: all its turns are on record."""
        return {}

    async def _play(self, task: Task, siblings: Siblings) -> Episode:
        if task.id.purpose != TRAINING:
            # The next round asks the same prompts anew, of newer weights; one that was cut off is made again whole.
            return await self._run(task, siblings, EpisodeRecord(self._named), Unrecorded())
        record = self._log.records.get(task.id)
        if record is not None:
            self.continued += 1
            if record.program != self._named:
                self._begin_anew(task, f"its program was {record.program} and is {self._named}")
                record = None
        if record is None:
            record = self._log.begin(task.id, self._named)
        try:
            return await self._run(task, siblings, record, self._log)
        except DivergedError as difference:
            self._begin_anew(task, str(difference))
            return await self._run(task, siblings, self._log.begin(task.id, self._named), self._log)

    async def _run(self, task: Task, siblings: Siblings, record: EpisodeRecord, log: CallLog) -> Episode:
        play = Play(task, record, log, siblings, self._tries)
        try:
            await self._program(task, Voice(play), Calls(play))
        finally:
            if play.fault is not None:
                raise play.fault
        record.check_over(play.made)
        return play.episode()

    def _begin_anew(self, task: Task, difference: str) -> None:
        self.diverged += 1
        if self.diverged == 1 or self.diverged > _LOUD_SHARE * self.continued:
            _log.warning("%s begins anew, %d of %d have: %s", task.id, self.diverged, self.continued, difference)


class Play:
    """One run of an episode's program over its record."""

    def __init__(
        self,
        task: Task,
        record: EpisodeRecord,
        log: CallLog,
        siblings: Siblings,
        tries: int,
    ) -> None:
        self.task = task
        self.made: set[CallPlace] = set()
        self.fault: Exception | None = None
        """What ended a call that is no matter of the program's: of the engines, of the world, of the record."""
        self._record, self._log, self._siblings, self._tries = record, log, siblings, tries
        self._leaves: list[Leaf] = []
        self._turns = 0
        self._seconds = 0.0
        self._finish: FinishReason = "stop"

    async def ask(self, place: CallPlace, context: Sequence[int], max_tokens: int | None) -> Answer:
        ids = tuple(context)
        kind = ASK if max_tokens is None else f"{ASK} for {max_tokens} tokens"
        call = self._at(place, what := What(kind, prompt_digest(ids)))
        turn = None if call is None else call.turn
        number, self._turns = self._turns, self._turns + 1
        if turn is None:
            sampling = self.task.sampling
            if max_tokens is not None:
                sampling = replace(sampling, max_tokens=min(sampling.max_tokens, max_tokens))
            result = await self._ask(self.task.request(number, ids, sampling))
            turn = RecordedTurn(result.tokens, result.finish, result.seconds, result.receipt)
            self._log.put(self.task.id, RecordedCall(place, what, True, turn=turn))
        self._add(ids, turn)
        said = tuple(turn.tokens.ids.tolist())
        return Answer((*ids, *said), said, turn.finish)

    async def _ask(self, request: GenerationRequest) -> GenerationResult:
        try:
            return await self._siblings.ask(request)
        except Exception as error:
            self.fault = error
            raise

    async def call(
        self, place: CallPlace, kind: str, function: Callable[..., Awaitable[Json]], arguments: tuple[Json, ...]
    ) -> Json:
        recorded = self._at(place, what := What(kind, of_arguments(arguments)))
        if recorded is not None and recorded.done:
            return recorded.result
        if recorded is None:
            self._log.put(self.task.id, RecordedCall(place, what))
            await asyncio.wrap_future(self._log.synced())
        _key.set("/".join(map(str, (*self.task.id[:3], *place.branch, place.number))))
        result = await self._patiently(place, kind, function, arguments)
        plain = json.dumps(result)
        self._log.put(self.task.id, RecordedCall(place, what, True, json.loads(plain)))
        # As it will be when the program is run again: a tuple has become a list by then.
        return json.loads(plain)

    def episode(self) -> Episode:
        """What it came to. Raises ``ValueError`` for a program that never asked the model."""
        if not self._leaves:
            raise ValueError(f"{self.task.id}: the environment's program has ended without asking the model anything")
        return Episode(self.task.id, self._leaves, self._finish, seconds=self._seconds)

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
            except WorldError as error:
                if attempt + 1 == self._tries:
                    self.fault = UnreachableError(
                        f"{self.task.id}: {kind} ({place}) failed {self._tries} times, the last time with: {error}. "
                        "The episode has no reward; start again when what it calls is there"
                    )
                    raise self.fault from error
                _log.warning("%s: %s failed and is called again: %s", self.task.id, kind, error)
                await asyncio.sleep(_PAUSE_SECONDS * 2**attempt)
        raise AssertionError

    def _add(self, context: tuple[int, ...], turn: RecordedTurn) -> None:
        """A turn continues the leaf that the context begins with, the latest one if there are several; else it begins
        another."""
        self._finish, self._seconds = turn.finish, self._seconds + turn.seconds
        for place, leaf in reversed(list(enumerate(self._leaves))):
            so_far = (*leaf.prompt_ids, *leaf.tokens.ids.tolist())
            if context[: len(so_far)] == so_far:
                version = int(leaf.tokens.versions[-1]) if len(leaf.tokens) else 0
                observed = Tokens.given(context[len(so_far) :], version, like=turn.tokens)
                self._leaves[place] = leaf.continued(observed, turn.tokens, turn.receipt)
                return
        self._leaves.append(Leaf(context, turn.tokens, turn.receipt))


class Voice:
    """The model, to one episode's program."""

    def __init__(self, play: Play, branch: tuple[str, ...] = ()) -> None:
        self._play = play
        self._branch = branch
        self._number = 0

    def branch(self, name: str) -> Voice:
        """For turns that the program asks for beside other calls."""
        return Voice(self._play, (*self._branch, name))

    async def ask(self, context: Sequence[int], *, max_tokens: int | None = None) -> Answer:
        """The model's answer to ``context``, everything that it is to see, in at most as many tokens as the job allows
        (or ``max_tokens``, if that is less). Raises ``EngineError``."""
        number, self._number = self._number, self._number + 1
        return await self._play.ask(CallPlace((*self._branch, ASK), number), context, max_tokens)


class Calls:
    """The world, to one episode's program."""

    def __init__(self, play: Play, branch: tuple[str, ...] = ()) -> None:
        self._play = play
        self._branch = branch
        self._number = 0

    @property
    def seed(self) -> int:
        return self._play.task.world_seed

    @property
    def key(self) -> str:
        return _key.get()

    def branch(self, name: str) -> Calls:
        return Calls(self._play, (*self._branch, name))

    async def call(self, kind: str, function: Callable[..., Awaitable[Json]], *arguments: Json) -> Json:
        number, self._number = self._number, self._number + 1
        return await self._play.call(CallPlace(self._branch, number), kind, function, arguments)


class Siblings:
    """Sends what siblings ask in one turn of the event loop as one group: it goes to one engine."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[GenerationResult]]] = []

    async def ask(self, request: GenerationRequest) -> GenerationResult:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        done: asyncio.Future[GenerationResult] = loop.create_future()
        self._waiting.append((request, done))
        return await done

    def _send(self) -> None:
        group = [(request, done) for request, done in self._waiting if not done.done()]
        self._waiting = []
        if not group:
            return
        generating = asyncio.create_task(self._generate(group), name="siblings")
        for _, done in group:
            done.add_done_callback(functools.partial(_stop_if_unwanted, generating, group))

    async def _generate(self, group: Sequence[tuple[GenerationRequest, asyncio.Future[GenerationResult]]]) -> None:
        def finished(position: int, result: GenerationResult) -> None:
            done = group[position][1]
            if not done.done():
                done.set_result(result)

        try:
            results = await self._model.generate([request for request, _ in group], finished)
        except Exception as error:  # noqa: BLE001  (it is theirs who asked)
            for _, done in group:
                if not done.done():
                    done.set_exception(error)
            return
        for position, result in enumerate(results):
            finished(position, result)


def named(program: Program) -> str:
    """A program's name and a digest of its text, which changes with it. An object's program is its class."""
    written = program if inspect.isroutine(program) or inspect.isclass(program) else type(program)
    try:
        text = inspect.getsource(written)
    except (OSError, TypeError):
        text = ""
    name = f"{getattr(program, '__module__', '')}:{getattr(program, '__qualname__', type(program).__qualname__)}"
    return f"{name} {zlib.crc32(text.encode()):08x}"


def _tell(ended: Callable[[int, Episode], None], position: int, task: asyncio.Task[Episode]) -> None:
    if not task.cancelled() and task.exception() is None:
        ended(position, task.result())


def _stop_if_unwanted(
    generating: asyncio.Task[None],
    group: Sequence[tuple[GenerationRequest, asyncio.Future[GenerationResult]]],
    _: asyncio.Future[GenerationResult],
) -> None:
    if all(done.cancelled() for _, done in group):
        generating.cancel()


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
