"""The number of engines while a run is under way: more join, surplus ones are drained and leave.

Level-based: ``wanted`` may change at any time, and ``run`` brings the pool there. A new engine serves after it has got
the present weights through a verified publication. A leaving one hands its requests back with the tokens they have,
which go on elsewhere; no publication is under way meanwhile. Engines that are lost are the pool's own business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.pools.dispatch import CALL_SECONDS
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.rollout.actor import EnginePlace
from rljob_trainer.rollout.handle import EngineHandle
from rljob_trainer.waits import Taken

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""How often the pool is looked at, for engines that were lost or replaced."""
_LEAVE_SECONDS = 3 * CALL_SECONDS
"""Three calls: what is on its way to the engine, what it has in hand, what it has finished."""
_PAUSE_SECONDS = 10.0
"""After an engine that did not come up, or was lost before it had finished anything, before the next one is tried."""


@dataclass(frozen=True, slots=True)
class Drained:
    """An engine that has left; its pod is not needed any more."""

    name: str
    place: EnginePlace | None


class EngineCount:
    """Keeps a pool at ``wanted`` engines. ``run`` it as a task, and cancel that before the pool is closed."""

    def __init__(
        self,
        pool: RolloutPool,
        count: int,
        *,
        start: Callable[[str], Awaitable[EngineHandle]],
        bring_up: Callable[[EngineHandle], Awaitable[None]],
        between: Taken,
        prefix: str = "",
    ) -> None:
        """``count`` engines are there. ``between(...)`` is a time in which no publication is under way. ``prefix``
        stands before the numbers that engines are called by."""
        self.wanted = count
        self.problem: Exception | None = None
        """Why the last engine did not come up; None: it did."""
        self.loss: str | None = None
        """Which engine was lost before it had finished anything, and why; None: one has finished something since."""
        self.drained: list[Drained] = []
        """Engines that left and whose pods nothing else uses."""
        self._pool = pool
        self._start, self._bring_up, self._between = start, bring_up, between
        self._prefix, self._next_name = prefix, count
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._known_losses = 0
        self._lost_at = 0.0

    @property
    def starting(self) -> list[str]:
        """Names of the engines that are being started or get their first weights."""
        return list(self._starting)

    def want(self, count: int) -> None:
        """Changes ``wanted``, at least 1."""
        self.wanted = count
        self._changed.set()

    async def run(self) -> None:
        """Never returns."""
        try:
            while True:
                await self._approach()
                self._changed.clear()
                try:
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            for task in self._starting.values():
                task.cancel()
            await asyncio.gather(*self._starting.values(), return_exceptions=True)

    async def _approach(self) -> None:
        """Starts what is missing and drains what is too much."""
        self._learn_of_losses()
        serving = [engine.name for engine in self._pool.serving]
        starting = [name for name in self._starting if name not in serving]
        here = [engine.name for engine in self._pool.engines if engine.name not in starting]
        missing = self.wanted - len(here) - len(self._pool.lent) - self._pool.replacing - len(starting)
        for _ in range(missing):
            name = f"{self._prefix}{self._next_name}"
            self._next_name += 1
            task = asyncio.create_task(self._join(name))
            self._starting[name] = task
            task.add_done_callback(lambda _, name=name: self._starting.pop(name, None))  # type: ignore[misc]
        for name in starting[: max(0, -missing)]:
            missing += 1
            self._starting[name].cancel()
        # An engine is never taken away before as many as are wanted serve.
        surplus = min(-missing, len(serving) - self.wanted)
        for name in sorted(serving, key=_order)[len(serving) - surplus :] if surplus > 0 else []:
            await self._leave(name)

    def _learn_of_losses(self) -> None:
        """An engine that dies on its first work would be replaced by one that does the same, at once and for ever."""
        if self._pool.finished_at > self._lost_at:
            self.loss = None
        for loss in self._pool.losses[self._known_losses :]:
            if not loss.has_answered:
                self.loss = f"engine {loss.name} was lost before it finished any request: {loss.reason}"
                self._lost_at = asyncio.get_running_loop().time()
        self._known_losses = len(self._pool.losses)

    async def _join(self, name: str) -> None:
        if self.loss is not None:
            await asyncio.sleep(self._lost_at + _PAUSE_SECONDS - asyncio.get_running_loop().time())
        try:
            handle = await self._start(name)
            if handle.place is not None:
                pod = handle.place.pod
                self.drained = [gone for gone in self.drained if gone.place is None or gone.place.pod != pod]
            self._pool.add(handle)
            try:
                await self._bring_up(handle)
            except BaseException:
                if handle in self._pool.engines:
                    await self._pool.remove(name, drain=False)
                    self._gone(handle)
                raise
        except (EngineError, DeadlineError) as error:
            self.problem = error
            log.warning("engine %s does not start: %s", name, error)
            await asyncio.sleep(_PAUSE_SECONDS)
            return
        self.problem = None
        log.info("%s has joined: %d engines serving", _called(handle), len(self._pool.serving))

    async def _leave(self, name: str) -> None:
        async with self._between(f"engine {name}", f"engine {name} leaves", _LEAVE_SECONDS):
            handle = next((engine for engine in self._pool.serving if engine.name == name), None)
            if handle is None:
                return
            await self._pool.remove(name)
            self._gone(handle)
        log.info("%s has left: %d engines serving", _called(handle), len(self._pool.serving))

    def _gone(self, handle: EngineHandle) -> None:
        """Remembers where an engine was, unless another one is there too."""
        there = [*self._pool.engines, *self._pool.lent]
        pods = {engine.place.pod for engine in there if engine.place is not None}
        if handle.place is None or handle.place.pod not in pods:
            self.drained.append(Drained(handle.name, handle.place))


def _called(handle: EngineHandle) -> str:
    """An engine's name, and where it is: kubectl knows pods only."""
    return f"engine {handle.name}" + ("" if handle.place is None else f" on {handle.place.pod}")


def _order(name: str) -> tuple[int, ...]:
    """Names are numbers with dots: 2 before 10, and 1 before its replacement 1.1."""
    return tuple(int(part) for part in name.rpartition("-")[2].split("."))
