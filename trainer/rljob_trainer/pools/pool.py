"""The engines as one: groups of requests in, results out, whatever happens to an engine on the way.

Engines may join, leave, be lost or be lent at any time; a new one serves only after ``activate``, once it has the
present weights: from the first publication on, who does not hold the manifest of the present version serves nothing.
Which engine gets which requests is ``dispatch.py``'s part, loading weights that of
``publish/publication.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import Finished, GenerationRequest, GenerationResult
from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.pools.activity import Report
from rljob_trainer.pools.dispatch import CALL_SECONDS, Dispatch
from rljob_trainer.pools.homes import Homes
from rljob_trainer.pools.lent import Lent
from rljob_trainer.pools.members import LostEngine, Member, pending_of
from rljob_trainer.rollout.engine_loop import EngineLoop, EngineStatus
from rljob_trainer.rollout.handle import EngineHandle, EngineLostError
from rljob_trainer.rollout.shelf import Shelf
from rljob_trainer.weights.manifest import Version

log = logging.getLogger(__name__)

_STARTS = 3
"""Processes that may be lost in their start, one after the other, before an engine is not replaced."""

Replace = Callable[[str], Awaitable[EngineHandle]]
"""Starts an engine in place of the named one."""
Starting = Callable[[str], AbstractAsyncContextManager[object]]
"""``async with starting(name)``: inside, an engine may start in place of the named one."""
MadeAgain = Callable[[Sequence[EpisodeId]], None]
"""Told the requests that are made again for want of their engine."""
BringUp = Callable[[EngineHandle], Awaitable[None]]
"""Gives a new engine the present weights."""


class RolloutPool(Dispatch):
    """A changing set of engines behind ``generate``.

    Usage::

        async with RolloutPool(version=0) as pool:
            pool.add(await RayEngine.start("0", spec))
            pool.activate(["0"])
            results = await pool.generate(requests_of_one_prompt)
    """

    def __init__(
        self,
        *,
        version: int = 0,
        fixed_dispatch: bool = False,
        max_outstanding: int = 512,
        replace: Replace | None = None,
        starting: Starting = lambda name: nullcontext(),
        bring_up: BringUp | None = None,
        shelf: Shelf | None = None,
        worked: Report | None = None,
        made_again: MadeAgain | None = None,
        homes: Homes | None = None,
        lasting: bool = False,
    ) -> None:
        """``replace`` starts an engine for a lost one, when ``starting`` lets it, and ``bring_up`` gives it weights.
        ``made_again`` is told of requests that are made again for want of their engine. ``lasting``: while no engine is
        left requests wait, because somebody else starts others. The rest is ``Dispatch``'s."""
        super().__init__(
            version=version,
            fixed_dispatch=fixed_dispatch,
            max_outstanding=max_outstanding,
            shelf=shelf,
            worked=worked,
            homes=homes,
        )
        self._replace, self._starting, self._bring_up, self._made_again = replace, starting, bring_up, made_again
        self._lasting = lasting
        self.published: Version | None = None
        """The present version; None: nothing was published, and engines serve the weights that they were built with."""
        self.replacing = 0
        """Replacements of lost engines that are being started."""
        self._replaced = asyncio.Event()
        """Set when the start of a replacement has succeeded or failed."""
        self.losses: list[LostEngine] = []
        """The engines lost so far."""
        self._closing = False

    async def __aenter__(self) -> RolloutPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------------ members

    def bring_up_by(self, bring_up: BringUp) -> None:
        """From now on ``bring_up`` gives engines that come late the present weights: the publication's part, which
        needs the pool before it is there itself."""
        self._bring_up = bring_up

    @property
    def engines(self) -> list[EngineHandle]:
        """All engines that are to get new weights, in the order of their names."""
        return [member.handle for member in self._members.sorted() if member.state not in ("leaving", "lent")]

    @property
    def lost(self) -> list[str]:
        """Names of the engines lost so far."""
        return [loss.name for loss in self.losses]

    @property
    def serving(self) -> list[EngineHandle]:
        """The engines that get requests."""
        return [member.handle for member in self._members.serving]

    @property
    def lent(self) -> list[EngineHandle]:
        """The engines that somebody has borrowed."""
        return [member.handle for member in self._members.sorted() if member.state == "lent"]

    def add(self, handle: EngineHandle) -> None:
        """A new engine. It serves from ``activate`` on."""
        if handle.name in self._members:
            raise ValueError(f"the pool already has an engine {handle.name}")
        member = Member(handle)
        self._members[handle.name] = member
        member.followers.append(self._spawn(self._collect(member)))
        # A rank answers one call at a time, and its death is the learner's to notice.
        if handle.place is not None:
            member.followers.append(self._spawn(self._watch(member)))

    def delivered(self, names: Iterable[str], version: Version) -> None:
        """The named engines have been given ``version`` and say that they hold its manifest. They do not serve yet."""
        for name in names:
            if (member := self._members.get(name)) is not None:
                member.was_given(version)

    def present(self, version: Version) -> None:
        """``version`` has been delivered to all engines that are to serve from now on."""
        self.published, self.version = version, version.number

    def activate(self, names: Iterable[str]) -> None:
        """The named engines may serve. Raises ``EngineError`` for one that was given other weights than the present
        version's, or none."""
        for name in names:
            member = self._members.get(name)
            if member is None or member.state != "joining":
                continue
            if self.published is not None and member.holds != self.published:
                has = "no known version" if member.holds is None else str(member.holds)
                raise EngineError(f"engine {name} cannot serve {self.published}: it holds {has}; please report this")
            member.serves()
        for member in self._members.values():
            self._follow(member)
        self._wake()

    async def hold(self, name: str) -> None:
        """No more requests for an engine that is not trusted, until ``activate``. What it has in hand goes on
        elsewhere, without the tokens of the present version."""
        member = self._members.get(name)
        if member is not None and member.state == "serving":
            member.joins()
            await self._dispatched()
            await self._take_back(member, before_version=self.version)

    async def remove(self, name: str, *, drain: bool = True) -> None:
        """Takes an engine out and ends it. ``drain``: its requests go on elsewhere from where they are; else they start
        again."""
        member = self._members[name]
        member.leaves()
        if drain:
            await self._dispatched()
            await self._take_back(member)
        self._drop(member)

    def report_lost(self, name: str, reason: str) -> None:
        """An engine is gone: its requests are made again elsewhere, and a new one is started if the pool can."""
        member = self._members.get(name)
        if member is None or self._closing:  # it was ended, and somebody had still asked it something
            return
        again = [request for request, pending in member.pending.items() if not pending.done.done()]
        is_lent = member.state == "lent"
        then = "validation requests fail" if is_lent else "requests are generated again"
        log.warning("engine %s is lost (%s); %d %s", name, reason, len(again), then)
        self.losses.append(LostEngine(name, reason, member.has_answered))
        if again and not is_lent and self._made_again is not None:
            self._made_again(again)
        replaceable = self._replace is not None and member.state != "leaving"
        self._drop(member)
        if replaceable:
            self.replacing += 1
            self._spawn(self._start_replacement(name))
        elif not self._members and not self._lasting:
            self._fail(EngineError(f"no engine is left: {name} was the last one ({reason})"))

    @property
    def why_none_is_left(self) -> str:
        """What became of the last engine, or of the start of its successor; empty where nothing is known of it."""
        if self._failure is not None:
            return str(self._failure)
        return f"engine {self.losses[-1].name}: {self.losses[-1].reason}" if self.losses else ""

    async def wait_for_replacement(self) -> None:
        """While no engine is left: until a replacement has started, or none is being started any more. The starts have
        deadlines of their own."""
        while not self._members and self.replacing:
            self._replaced.clear()
            await self._replaced.wait()

    async def _started(self, name: str, replace: Replace) -> EngineHandle:
        """A replacement of the named engine. A start that says why it fails would do so again; a process that is killed
        meanwhile says nothing about the next."""
        for _ in range(_STARTS - 1):
            try:
                return await replace(name)
            except EngineLostError as error:
                log.warning("a replacement for engine %s was lost during start (%s); starting another one", name, error)
        return await replace(name)

    async def _start_replacement(self, name: str) -> None:
        assert self._replace is not None
        try:
            try:
                async with self._starting(name):
                    handle = await self._started(name, self._replace)
                    self.add(handle)
            finally:
                self.replacing -= 1
                self._replaced.set()
            if self._bring_up is not None:
                await self._bring_up(handle)
            else:
                self.activate([handle.name])
        except (EngineError, DeadlineError) as error:
            log.warning("no replacement for engine %s: %s", name, error)
            # One that was lost before it served has a successor of its own.
            if not self._members and not self.replacing:
                self._fail(error)

    def _drop(self, member: Member) -> None:
        """Ends a member's process and returns what it had in hand to the queue."""
        if self._members.pop(member.handle.name, None) is None:
            return
        member.unfollow()
        member.handle.kill()
        self._return_all(member)
        member.leaves()
        self.activity.forget(member.handle.name)

    async def status(self) -> list[EngineStatus]:
        """Every engine's own account."""
        calls = [m.handle.within(CALL_SECONDS, EngineLoop.status) for m in self._members.values()]
        return [status for status in await asyncio.gather(*calls) if isinstance(status, EngineStatus)]

    async def close(self) -> None:
        """Ends all engines; requests that are under way fail."""
        self._closing = True
        self._fail(EngineError("the pool has been closed"))
        # First who might still start an engine.
        await self._end_tasks()
        for member in list(self._members.values()):
            with suppress(EngineError, DeadlineError):
                await member.handle.within(5.0, EngineLoop.close)
            self._drop(member)
        await self._end_tasks()

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------ lending

    async def lend(self, count: int) -> Lent | None:
        """Borrows up to ``count`` engines, those with the least in hand, whose requests go on elsewhere; at least one
        stays. None when none can be spared. They keep their weights until ``Lent.give_back``. Not while a publication
        is under way."""
        serving = sorted(self._members.serving, key=lambda member: member.budget)
        chosen = serving[: min(count, len(serving) - 1)]
        for member in chosen:
            member.joins()
        await self._dispatched()
        for member in chosen:
            await self._take_back(member)
        lent = [member for member in chosen if self._members.get(member.handle.name) is member]
        for member in lent:
            member.is_lent(self.version)
        return Lent(lent, self._ask, self._take_home) if lent else None

    async def _ask(
        self, member: Member, requests: Sequence[GenerationRequest], finished: Finished | None = None
    ) -> list[GenerationResult]:
        """The results from this engine and no other."""
        group = pending_of(requests, finished)
        for pending in group:
            pending.placed()
            member.pending[pending.request.id] = pending
        try:
            await self._submit(member, [group])
            self._follow(member)
            return [await pending.done for pending in group]
        except BaseException:
            self._forget(group)
            raise

    def _take_home(self, member: Member) -> None:
        """A lent engine serves again, with weights that may be newer by now."""
        if self._members.get(member.handle.name) is not member or member.state != "lent":
            return
        if member.comes_home() == self.version or self._bring_up is None:
            self.activate([member.handle.name])
        else:
            self._spawn(self._bring_home(member, self._bring_up))

    async def _bring_home(self, member: Member, bring_up: BringUp) -> None:
        try:
            await bring_up(member.handle)
        except (EngineError, DeadlineError) as error:
            self.report_lost(member.handle.name, str(error))
