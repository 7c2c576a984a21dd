"""Requests between a queue and the engines: who gets which, what each has in hand, and what comes back.

A group goes whole to one engine, since its siblings share a prompt, and what an episode asks later to the engine that
has the keys and values of all before (``homes.py``). What an engine has in hand is known here, so that
whatever becomes of the engine its requests can be made again elsewhere. Who the engines are is ``pool.py``'s part.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.receipts import ReceiptError, check_answer
from rljob_trainer.episodes.requests import Finished, GenerationRequest, GenerationResult, continued
from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.pools.activity import Activity, Report
from rljob_trainer.pools.homes import Homes, goes_home
from rljob_trainer.pools.members import Member, Members, Pending, Standing, pending_of
from rljob_trainer.rollout.columns import Requests
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineLostError
from rljob_trainer.rollout.shelf import Shelf
from rljob_trainer.waits import NEVER, patiently

log = logging.getLogger(__name__)

_POLL_SECONDS = 5.0
"""One long poll of an engine's results."""
_LINGER_SECONDS = 0.025
"""A call costs driver and engine a millisecond of processor time each, as much as a token of a small model: what
finishes close together travels together."""
_MOST_UNSOUND = 16
"""Responses of a process that may arrive as they were not made, before it is no accident any more."""
_SUBMIT_SECONDS = 2.0
"""How long others wait behind an engine that does not take what it is given."""
CALL_SECONDS = 60.0
"""Longest wait for an answer that takes no generation; an engine answers between two steps."""


class Dispatch(ABC):
    """Hands groups of requests to the members that serve, and their results to who asked."""

    def __init__(
        self,
        *,
        version: int = 0,
        fixed_dispatch: bool = False,
        max_outstanding: int = 512,
        shelf: Shelf | None = None,
        worked: Report | None = None,
        homes: Homes | None = None,
    ) -> None:
        """``fixed_dispatch``: groups that come in together go to the engines in turn and all at once, so a repeated run
        is bitwise the same; else each goes to the engine with the fewest tokens ahead of it, if that one has fewer than
        ``max_outstanding`` requests. Either way what continues an episode goes to its home, as ``homes`` knows it. On
        the ``shelf`` the arrays of finished and interrupted responses wait, if given. ``worked`` is told when each
        engine had work, and under which version."""
        self.version = version
        """The policy version that new requests start under."""
        self.activity = Activity(worked)
        self.homes = homes or Homes()
        """Who has the keys and values of which episode."""
        self.finished_at = NEVER
        """When an engine that is not lent finished a request last, in the time of the event loop."""
        self._members = Members()
        self._fixed = fixed_dispatch
        self._max_outstanding = max_outstanding
        self._shelf = shelf
        self._queue: deque[list[Pending]] = deque()
        self._groups: dict[int, list[Pending]] = {}
        self._paused = False
        self._dispatcher: asyncio.Task[None] | None = None
        self._stuck: dict[str, asyncio.Task[None]] = {}
        """Engines that do not take what they were given, and who waits for them to."""
        self._wanted = asyncio.Event()
        self._handed_back = asyncio.Event()
        """Set when an engine has fewer requests in hand than before."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._unsound = 0

    @abstractmethod
    def report_lost(self, name: str, reason: str) -> None:
        """An engine is gone."""

    # ------------------------------------------------------------------ generation

    async def generate(
        self, requests: Sequence[GenerationRequest], finished: Finished | None = None
    ) -> list[GenerationResult]:
        """The results of one group, in the order of its requests. ``finished`` is called with each of them and its
        position as soon as it is there.

        Waits as long as there is an engine, or the hope of one; raises ``EngineError`` when there is none. Cancelling
        it aborts the requests.
        """
        self._check()
        group = pending_of(requests, finished)
        self._queue.append(group)
        self._groups[id(group)] = group
        self._wake()
        try:
            return [await pending.done for pending in group]
        except BaseException:
            self._forget(group)
            raise
        finally:
            del self._groups[id(group)]

    async def begun(self) -> list[GenerationRequest]:
        """Every request that ``generate`` has not returned, with the tokens it has by now.

        Running ones are interrupted for that, and go on from there.
        """
        if self._members.busy and not self._paused:
            await self.pause(interrupt=True)
            self.resume()
        return [
            continued(pending.request, pending.done.result()) if _is_there(pending.done) else pending.request
            for group in self._groups.values()
            for pending in group
        ]

    async def cut(self, is_over: Callable[[EpisodeId], bool]) -> None:
        """Every request that ``generate`` has not returned and that ``is_over`` ends with the tokens it has by now, and
        its ``finish`` is ``deadline``. One without a token gets its first."""
        await asyncio.sleep(0)  # what was asked for in this turn of the event loop is known after it
        for group in self._groups.values():
            for pending in group:
                pending.is_cut = pending.is_cut or is_over(pending.request.id)
        await self._dispatched()
        waiting = [[pending for pending in group if not self._is_over(pending)] for group in self._queue]
        self._queue = deque(group for group in waiting if group)
        async with asyncio.TaskGroup() as tasks:
            for member in self._members.own:
                if wanted := [id for id, pending in member.pending.items() if pending.is_cut]:
                    tasks.create_task(self._take_back(member, only=wanted))

    def waiting_for(self) -> str:
        """In a few words: where the oldest request runs, and what keeps others from an engine."""
        return self._members.waiting_for(self.queued, paused=self._paused) or "no request is running"

    def progress(self) -> list[int]:
        """For each group that ``generate`` has not returned, how many of its requests are finished."""
        return [sum(pending.done.done() for pending in group) for group in self._groups.values()]

    @property
    def queued(self) -> int:
        """Requests that no engine has yet."""
        return sum(len(group) for group in self._queue)

    def standings(self) -> list[Standing]:
        """Every engine, by name."""
        return self._members.standings()

    @property
    def paused(self) -> bool:
        """Whether requests are held back, for a publication."""
        return self._paused

    async def pause(self, *, interrupt: bool = False) -> None:
        """No request enters an engine until ``resume``; ``interrupt``: running ones stop and go on from there later."""
        self._paused = True
        if interrupt:
            await self._dispatched()
            async with asyncio.TaskGroup() as tasks:
                for member in self._members.own:
                    tasks.create_task(self._take_back(member))

    def resume(self) -> None:
        self._paused = False
        self._wake()

    async def wait_idle(self, seconds: float) -> None:
        """Until no engine of a paused pool has anything in hand: it is finished, or has returned to the queue because
        its engine was lost or left. Raises ``DeadlineError`` saying what still runs when none finishes for so many
        ``seconds``."""
        began = asyncio.get_running_loop().time()
        try:
            while self._members.busy:
                self._handed_back.clear()
                await patiently(self._handed_back, lambda: max(began, self.finished_at) + seconds)
        except TimeoutError:
            raise DeadlineError(
                f"running requests must finish before the weights change, but none did within {seconds:g} s "
                f"(deadlines.progressSeconds): {self.waiting_for()}. If responses take that long, raise it, shorten "
                "rollout.maxResponseTokens, or allow interruptions (pipeline.partialRollout: recompute)."
            ) from None

    # ------------------------------------------------------------------ to the engines

    def _wake(self) -> None:
        self._wanted.set()
        if self._dispatcher is None or self._dispatcher.done():
            self._dispatcher = self._spawn(self._dispatch())

    async def _dispatch(self) -> None:
        """Hands waiting groups to engines until none can be placed."""
        while True:
            self._wanted.clear()
            # Groups that come in during one turn of the event loop travel together.
            seen = -1
            while seen != len(self._queue):
                seen = len(self._queue)
                await asyncio.sleep(0)
            placed = self._place()
            if placed:
                tasks = {m.handle.name: self._spawn(self._submit(m, groups)) for m, groups in placed}
                # One that hangs does not keep others from their work; in a fixed order all wait for each.
                await asyncio.wait(tasks.values(), timeout=None if self._fixed else _SUBMIT_SECONDS)
                for name, task in tasks.items():
                    if not task.done():
                        self._stuck[name] = task
                        task.add_done_callback(lambda _, name=name: self._takes_again(name))  # type: ignore[misc]
            if not self._wanted.is_set():
                return

    def _takes_again(self, name: str) -> None:
        self._stuck.pop(name, None)
        if self._queue:
            self._wake()

    async def _dispatched(self) -> None:
        """Until no request is between the queue and an engine."""
        if self._dispatcher is not None:
            await asyncio.wait([self._dispatcher])
        if self._stuck:
            await asyncio.wait(list(self._stuck.values()))

    def _place(self) -> list[tuple[Member, list[list[Pending]]]]:
        """Takes groups from the queue and says who gets which."""
        serving = [member for member in self._members.serving if member.handle.name not in self._stuck]
        if self._paused or not serving:
            return []
        placed: dict[str, tuple[Member, list[list[Pending]]]] = {}
        turn = 0
        while self._queue:
            free = serving if self._fixed else [m for m in serving if len(m.pending) < self._max_outstanding]
            if not free:
                break
            if (home := self._home(self._queue[0], free)) is not None:
                member = home
            elif self._fixed:
                member = serving[turn % len(serving)]
                turn += 1
            else:
                member = min(free, key=lambda m: m.budget)
            group = [pending for pending in self._queue.popleft() if not self._is_over(pending)]
            for pending in group:
                pending.placed()
                self.homes.sent(pending.request, member.handle.name)
                member.pending[pending.request.id] = pending
            placed.setdefault(member.handle.name, (member, []))[1].append(group)
        for member, _ in placed.values():
            self._follow(member)
        return list(placed.values())

    def _home(self, group: list[Pending], free: Sequence[Member]) -> Member | None:
        """The one of ``free`` that has what the group continues; None where no one has, or it has too much to do."""
        names = {self.homes.of(pending.request) for pending in group}
        home = next((member for member in free if names == {member.handle.name}), None)
        if home is None or self._fixed:
            return home
        least = min(member.budget for member in free)
        own = sum(pending.budget for pending in group)
        return home if goes_home(home.budget, least, own) else None

    def _is_over(self, pending: Pending) -> bool:
        """Whether there is nothing more to do for a request that no engine has."""
        if not pending.done.done() and pending.is_cut and (result := pending.cut()) is not None:
            self._answer(pending, result)
        return pending.done.done()

    async def _submit(self, member: Member, groups: list[list[Pending]]) -> None:
        """All groups in one message; if the engine refuses one of them, one by one."""
        requests = Requests(pending.request for group in groups for pending in group)
        submitted = asyncio.ensure_future(member.handle.within(CALL_SECONDS, EngineLoop.submit, requests))
        try:
            # Its results are asked for right behind it, not after an answer that says nothing.
            await asyncio.sleep(0)
            member.work.set()
            await submitted
        except (EngineError, DeadlineError) as error:
            self.report_lost(member.handle.name, str(error))
        except ValueError as error:
            if len(groups) > 1:
                for group in groups:
                    await self._submit(member, [group])
                return
            for pending in groups[0]:
                member.pending.pop(pending.request.id, None)
                if not pending.done.done():
                    pending.done.set_exception(error)
        finally:
            submitted.cancel()

    # ------------------------------------------------------------------ and back

    async def _collect(self, member: Member) -> None:
        """Follows one engine for as long as it is a member."""
        try:
            while True:
                await member.work.wait()
                if not member.pending:
                    member.work.clear()
                    continue
                results = await member.handle.within(
                    _POLL_SECONDS + CALL_SECONDS, EngineLoop.collect, _POLL_SECONDS, _LINGER_SECONDS
                )
                self._resolve(member, results)
        except (EngineError, DeadlineError) as error:
            self.report_lost(member.handle.name, str(error))

    async def _watch(self, member: Member) -> None:
        """Learns of an engine's death also when nothing is asked of it: one call that ends with the engine."""
        try:
            await member.handle.within(math.inf, EngineLoop.wait_until_ended)
        except EngineError as error:
            self.report_lost(member.handle.name, str(error))

    def _resolve(self, member: Member, results: Sequence[GenerationResult]) -> None:
        now = time.monotonic()
        asked = [(member.pending.pop(result.id, None), result) for result in results]
        wanted = [(pending, result) for pending, result in asked if pending is not None and not pending.done.done()]
        sound = [(pending, result) for pending, result in wanted if self._is_sound(pending, result)]
        if sound and self._shelf is not None:
            self._shelf.keep(*(result for _, result in sound))
        for pending, result in sound:
            self.homes.answered(pending.request, result)
            result.seconds = now - pending.since
            if pending.is_cut and result.finish == "length":
                result.finish = "deadline"  # it was left one token
            if not pending.done.done():
                self._answer(pending, result)
        if results:
            member.answers()
        if results and member.state != "lent":
            self.finished_at = asyncio.get_running_loop().time()
        self._handed_back.set()
        self._follow(member)
        if results and self._queue:
            self._wake()

    @staticmethod
    def _answer(pending: Pending, result: GenerationResult) -> None:
        pending.done.set_result(result)
        if pending.finished is not None:
            pending.finished(result)

    async def _take_back(
        self, member: Member, before_version: int | None = None, only: Sequence[EpisodeId] | None = None
    ) -> None:
        """Interrupts an engine's requests, or ``only`` some; they return to the queue's front with the tokens they have
        (only those of versions below ``before_version``, if given)."""
        try:
            partials = await member.handle.within(CALL_SECONDS, EngineLoop.abort, only)
            # Those that had finished before are still to be collected.
            finished = await member.handle.within(CALL_SECONDS, EngineLoop.collect, 0.0)
        except (EngineError, DeadlineError) as error:
            # Lost, or taken out of the pool by somebody else meanwhile: what it had in hand is made again.
            self.report_lost(member.handle.name, str(error))
            return
        self._resolve(member, finished)
        for partial in reversed(partials):
            pending = member.pending.pop(partial.id, None)
            if pending is not None and self._is_sound(pending, partial):
                self.homes.answered(pending.request, partial)
                if before_version is not None:
                    partial.tokens = partial.tokens.before(before_version)
                # What it brought along is on the shelf already.
                if len(partial.tokens) != len(pending.request.begun):
                    if self._shelf is not None:
                        self._shelf.keep(partial)
                    pending.begun_with(partial)
                if not self._is_over(pending):
                    self._queue.appendleft([pending])
        self._follow(member)
        self._wake()

    def _is_sound(self, pending: Pending, result: GenerationResult) -> bool:
        """Whether the response is what was asked for and what its engine made. If not it is asked for again, until
        that has happened too often."""
        try:
            check_answer(pending.request, result)
        except ReceiptError as error:
            self._unsound += 1
            if self._unsound > _MOST_UNSOUND:
                self._fail(error)
                if not pending.done.done():
                    pending.done.set_exception(error)
            else:
                log.warning("%s; it is generated again", error)
                self._queue.appendleft([pending])
            return False
        return True

    def _return_all(self, member: Member) -> None:
        """What an engine that is no member any more had in hand goes back to the queue's front."""
        for pending in reversed(member.pending.values()):
            if member.state == "lent":
                # Another engine has other weights by now.
                if not pending.done.done():
                    pending.done.set_exception(EngineLostError(f"engine {member.handle.name} is lost"))
            else:
                pending.starts_over()
                self._queue.appendleft([pending])
        member.pending.clear()
        self._handed_back.set()
        self._wake()

    def _forget(self, group: list[Pending]) -> None:
        """The caller has gone: nobody needs these results."""
        for pending in group:
            pending.done.cancel()
        for member in self._members.values():
            gone = [id for id, pending in member.pending.items() if pending.done.cancelled()]
            for id in gone:
                del member.pending[id]
            if gone:
                self._handed_back.set()
                self._spawn(self._abort(member, gone))

    async def _abort(self, member: Member, ids: list[EpisodeId]) -> None:
        try:
            await member.handle.within(CALL_SECONDS, EngineLoop.abort, ids)
        except (EngineError, DeadlineError) as error:
            self.report_lost(member.handle.name, str(error))

    def _follow(self, member: Member) -> None:
        version = self.version if member.kept_version is None else member.kept_version
        self.activity.follow(member.handle.name, version, busy=bool(member.pending))

    # ------------------------------------------------------------------ failures

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Nothing will be generated any more: everybody who waits learns why."""
        self._failure = self._failure or error
        waiting = [pending for group in self._queue for pending in group]
        waiting += [pending for member in self._members.values() for pending in member.pending.values()]
        self._queue.clear()
        for pending in waiting:
            if not pending.done.done():
                pending.done.set_exception(error)

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the pool has failed: {self._failure}") from self._failure


def _is_there(done: asyncio.Future[GenerationResult]) -> bool:
    return done.done() and not done.cancelled() and done.exception() is None
