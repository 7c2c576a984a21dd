"""Episodes of many turns: programs that ask the model and call the world, and go on after a kill. docs/episodes.md.

    async def episode(task: Task, model: Voice, world: World) -> float:
        answer = await model.chat(task.messages)
        result = await world.call("search", search, answer.text)
        answer = await model.chat([*task.messages, answer.message, {"role": "user", "content": result}])
        return float(task.prompt.answer in answer.text)

    environment = Programs(episode, log, chat, limits)

A program may catch what it likes: what it must not go on from is raised again when it has ended.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rljob_trainer.episodes.conversation import ChatFormat, Conversation
from rljob_trainer.episodes.curfew import EpisodeOverError
from rljob_trainer.episodes.environment import LanguageModel, Task
from rljob_trainer.episodes.episode import Episode
from rljob_trainer.episodes.identity import TRAINING, EpisodeId
from rljob_trainer.episodes.log import CallLog, EpisodeLog, Unrecorded
from rljob_trainer.episodes.play import Calls, EpisodeLimits, Play, Voice
from rljob_trainer.episodes.record import DivergedError, EpisodeLostError, EpisodeRecord
from rljob_trainer.episodes.requests import BegunTurn, GenerationRequest, GenerationResult
from rljob_trainer.errors import EngineError, ProgramError, RLJobError, WorldFailedError
from rljob_trainer.world.protocol import World

Program = Callable[[Task, Voice, World], Awaitable[Any]]
"""What it returns is the episode's reward, or nothing; it says so of the same record again."""
_LOUD_SHARE = 0.01
"""Of the episodes that went on from a record: if more than that begin anew, it is said at once and not only counted."""
_AT_ITS_OWN_SECONDS = 1.0
"""From when on a program that neither asks nor calls is something that a run may be waiting for."""
_DEAF_SECONDS = 2.0
"""That a cancelled program may take to end."""
_PAUSE_SECONDS = 1.0
"""Before an episode that was lost begins anew; twice as long each time."""
_log = logging.getLogger(__name__)


def _from_any(_: EpisodeRecord) -> None:
    """Most programs can be run again over whatever is on record."""


class Programs:
    """The environment of one program."""

    def __init__(
        self,
        program: Program,
        log: EpisodeLog,
        chat: ChatFormat,
        limits: EpisodeLimits,
        *,
        tries: int = 4,
        written: object = None,
        uses: Sequence[object] = (),
        counts: Callable[[], dict[str, float]] = dict,
        cannot_go_on: Callable[[EpisodeRecord], str | None] = _from_any,
        corpora: Mapping[str, str] | None = None,
    ) -> None:
        """``log`` keeps the calls of episodes that are trained on. ``tries``: how often a call is made that meets a
        failure of the world, and an episode begins that is lost, before the run ends. ``written``: what the user wrote,
        where ``program`` only calls it. ``uses``: functions and plain data that its episodes depend on besides
        (``named``). ``counts``: metrics of the program's own since the last call. ``cannot_go_on``: why an episode has
        to begin anew that has this record; None: it goes on from it. ``corpora``: as ``Environment`` has them."""
        self._program = program
        self._log = log
        self._chat = chat
        self._limits = limits
        self._tries = tries
        self._named = named(written or program, uses)
        self.branches = 0
        """Turns whose context did not continue what the model had seen and said."""
        self.continued = 0
        self.diverged = 0
        """Episodes that went on from a record, and those of them that began anew."""
        self._counts = counts
        self._cannot_go_on = cannot_go_on
        self._corpora = dict(corpora or {})
        self._plays: dict[EpisodeId, Play] = {}
        """Those that run."""
        self._ended: dict[int, int] = {}
        """Of prompts of training that run, by ordinal: how many of their episodes have ended."""
        self._playing: dict[int, tuple[Siblings, set[Play]]] = {}
        """Of each prompt that is trained on: who asks the model, and the episodes that have not ended."""
        self._told = (0, 0)
        """Of branches and diverged, by ``take_counts``."""

    async def play(
        self, tasks: Sequence[Task], model: LanguageModel, ended: Callable[[int, Episode], None] | None = None
    ) -> list[Episode]:
        siblings, prompt = Siblings(model), tasks[0].id.ordinal
        if tasks[0].id.purpose == TRAINING:
            self._ended[prompt], self._playing[prompt] = 0, (siblings, set())

        def tell(position: int, task: asyncio.Task[Episode]) -> None:
            if not task.cancelled() and task.exception() is None:
                if tasks[0].id.purpose == TRAINING and prompt in self._ended:
                    self._ended[prompt] += 1
                if ended is not None:
                    ended(position, task.result())

        running = [asyncio.create_task(self._play(task, siblings)) for task in tasks]
        for position, episode in enumerate(running):
            episode.add_done_callback(functools.partial(tell, position))
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await _cancelled([episode for episode in running if not episode.done()])
            if tasks[0].id.purpose == TRAINING:
                del self._ended[prompt], self._playing[prompt]
        for episode in running:
            if episode in done and (error := episode.exception()) is not None:
                raise error
        return [episode.result() for episode in running]

    def end(self, ordinal: int) -> bool:
        if ordinal not in self._playing:
            return True
        siblings, plays = self._playing[ordinal]
        if not all(play.has_asked for play in plays):
            return False
        for play in plays:
            play.curfew.end()
        siblings.send()
        return True

    def kept(self, episode: Episode) -> dict[EpisodeId, BegunTurn]:
        """Nothing: all its turns are on record."""
        return {}

    def restore(
        self, open_prompts: Collection[int], next_ordinal: int, *, step: int, version: int, published_as: int
    ) -> dict[EpisodeId, BegunTurn]:
        return self._log.restore(open_prompts, next_ordinal, step=step, version=version, published_as=published_as)

    def settled(self, open_prompts: Collection[int], next_ordinal: int) -> None:
        for id in [id for id in self._log.records if id.ordinal < next_ordinal and id.ordinal not in open_prompts]:
            self._log.over(id)

    def corpora(self) -> dict[str, str]:
        return self._corpora

    def take_counts(self) -> dict[str, float]:
        (branches, diverged), own = self._told, self._counts()
        self._told = self.branches, self.diverged
        return own | {
            "rollout/branched_turns": float(self.branches - branches),
            "rollout/diverged_episodes": float(self.diverged - diverged),
        }

    def progress(self) -> list[int]:
        return list(self._ended.values())

    def waiting_for(self) -> str:
        now, said = time.monotonic(), []
        calls = [call for play in self._plays.values() if not play.is_asking for call in play.calling]
        if calls:
            oldest = min(calls, key=lambda call: call.since)
            count = "1 call" if len(calls) == 1 else f"{len(calls)} calls"
            said.append(f"{count} of the environment, oldest ({oldest.kind}) for {now - oldest.since:.0f} s")
        idle = {id: since for id, play in self._plays.items() if (since := play.idle_since) is not None}
        if idle and now - min(idle.values()) >= _AT_ITS_OWN_SECONDS:
            longest = min(idle, key=lambda id: idle[id])
            count = "1 program makes" if len(idle) == 1 else f"{len(idle)} programs make"
            said.append(f"{count} no calls, longest {longest} for {now - idle[longest]:.0f} s")
        return "; ".join(said)

    def close(self) -> None:
        self._log.close()

    async def _play(self, task: Task, siblings: Siblings) -> Episode:
        for attempt in range(self._tries):
            try:
                return await self._begun(task, siblings)
            except EpisodeLostError as lost:
                if attempt + 1 == self._tries:
                    raise WorldFailedError(
                        f"{task.id}: it was lost {self._tries} times, the last time because {lost}. The episode has no "
                        "reward; start again when everything it needs is available"
                    ) from lost
                _log.warning("%s was lost and starts over: %s", task.id, lost)
                await asyncio.sleep(_PAUSE_SECONDS * 2**attempt)
        raise AssertionError

    async def _begun(self, task: Task, siblings: Siblings) -> Episode:
        """The episode, from what is on record of it on. Raises ``EpisodeLostError``."""
        if task.id.purpose != TRAINING:
            # The next round asks the same prompts anew, of newer weights; one that was cut off is made again whole.
            return await self._run(task, siblings, EpisodeRecord(self._named), Unrecorded())
        record = self._log.records.get(task.id)
        if record is not None:
            self.continued += 1
            if record.program != self._named:
                self._begin_anew(task, f"its program was {record.program} and is now {self._named}")
                record = None
            elif (reason := self._cannot_go_on(record)) is not None:
                self._begin_anew(task, reason, expected=True)
                record = None
        if record is None:
            record = self._log.begin(task.id, self._named)
        try:
            return await self._run(task, siblings, record, self._log)
        except DivergedError as difference:
            self._begin_anew(task, str(difference))
            return await self._run(task, siblings, self._log.begin(task.id, self._named), self._log)

    async def _run(self, task: Task, siblings: Siblings, record: EpisodeRecord, log: CallLog) -> Episode:
        conversation = Conversation(self._chat, task.prompt)
        play = Play(task, record, log, siblings, conversation, self._chat.decode, self._limits, self._tries)
        self._plays[task.id] = play
        returned = None
        own_task = asyncio.current_task()
        plays = self._playing[task.prompt.ordinal][1] if task.id.purpose == TRAINING else set[Play]()
        plays.add(play)
        try:
            with _until_over(play), play.curfew.program():
                returned = await self._program(task, Voice(play), Calls(play))
            await play.end()
        except (RLJobError, EpisodeLostError):
            raise
        except BaseException as error:
            # Whoever cancels an episode says so to its task; signals never come as exceptions here. A coroutine that
            # nobody will resume is closed from outside of its task.
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            if isinstance(error, GeneratorExit) and _running_task() is not own_task:
                raise
            if play.fault is None:
                raise ProgramError(
                    f"{task.id}: {self._named.partition(' ')[0]} raised {type(error).__name__}: {error}"
                    f"{_where(error)}. Correct it and start again: the run continues from its last checkpoint"
                ) from error
        finally:
            play.give_up()
            plays.remove(play)
            self._plays.pop(task.id, None)
            if play.fault is not None:
                raise play.fault
            if task.id.purpose == TRAINING:
                self.branches += conversation.branches
        if not play.curfew.is_over:
            record.check_over(play.made)
        return play.episode(returned)

    def _begin_anew(self, task: Task, difference: str, *, expected: bool = False) -> None:
        self.diverged += 1
        if self.diverged == 1 or (not expected and self.diverged > _LOUD_SHARE * self.continued):
            _log.warning("%s starts over (%d of %d so far): %s", task.id, self.diverged, self.continued, difference)


class Siblings:
    """Sends what siblings ask in one turn of the event loop as one group: it goes to one engine."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[GenerationResult]]] = []

    async def ask(self, request: GenerationRequest) -> GenerationResult:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self.send)
        done: asyncio.Future[GenerationResult] = loop.create_future()
        self._waiting.append((request, done))
        return await done

    def send(self) -> None:
        """Hands on what has been asked for so far."""
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
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  (it is theirs who asked)
            for _, done in group:
                if not done.done():
                    given_up = isinstance(error, asyncio.CancelledError)
                    done.set_exception(EngineError("the engines gave up the request") if given_up else error)
            return
        for position, result in enumerate(results):
            finished(position, result)


def named(program: object, uses: Sequence[object] = ()) -> str:
    """A program's name and a digest, which changes with its text, and with what it ``uses``: functions by their text,
    and plain data."""
    name = f"{getattr(program, '__module__', '')}:{getattr(program, '__qualname__', type(program).__qualname__)}"
    texts = [_text_of(program), *(_text_of(used) if callable(used) else json.dumps(used) for used in uses)]
    return f"{name} {zlib.crc32(chr(0).join(texts).encode('utf-8', 'backslashreplace')):08x}"


def _text_of(written: Any) -> str:
    """The text of a function or a class; an object's is that of its class. Empty where there is none."""
    while isinstance(written, functools.partial):
        written = written.func
    try:
        return inspect.getsource(written if inspect.isroutine(written) or inspect.isclass(written) else type(written))
    except (OSError, TypeError):
        return ""


@contextmanager
def _until_over(play: Play) -> Iterator[None]:
    """A program may let ``EpisodeOverError`` pass, also out of a group of tasks: then it is cut. Raises what else was
    in a group."""
    try:
        yield
    except EpisodeOverError:
        play.cut()
    except BaseExceptionGroup as group:
        if (others := group.split(EpisodeOverError)[1]) is not None:
            raise _first(others) from None
        play.cut()


async def _cancelled(running: Sequence[asyncio.Task[Episode]]) -> None:
    """Ends episodes that nobody wants any more, also those whose programs swallow every cancellation."""
    for episode in running:
        episode.cancel()
    if not running:
        return
    _, deaf = await asyncio.wait(running, timeout=_DEAF_SECONDS)
    if deaf:
        _log.warning("%d programs keep running although their episodes are cancelled; they are abandoned", len(deaf))
    for episode in deaf:
        with suppress(Exception):
            episode.get_coro().close()
        episode.cancel()
    if deaf:
        await asyncio.wait(deaf, timeout=_DEAF_SECONDS)


def is_cancelled() -> bool:
    """Whether a ``CancelledError`` in the running task is somebody's wish that it ends."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _running_task() -> asyncio.Task[Any] | None:
    with suppress(RuntimeError):  # no event loop runs here
        return asyncio.current_task()
    return None


def _where(error: BaseException) -> str:
    """The innermost line of an exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})" if trace else ""


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
