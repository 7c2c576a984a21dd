"""Whose turn it is on shared devices, and in which order memory changes hands.

What is on a GPU that a learner rank and an engine share (``placement: colocated``), step by step:

call             then on the device                                      for
at_start         nothing of the learner                                  engines that start and measure what is free
to_learner       the whole learner; nothing of the engine                the update, a checkpoint that is read
to_engines       the actor's parameters and the engine's weights         the publication, the trainer's canary scores
published        the engine's weights and KV cache                       sampling, validation, a checkpoint

So the two halves that need most, optimizer state and KV cache, are never there together, and the engine's weights meet
nothing but the actor's. In host memory meanwhile: the learner's state. The engine's weights are nowhere while the
learner works (vLLM's sleep level 2): a publication follows each time, before the engine wakes.

An engine that is lost has a successor, which needs the device to itself while it starts, as at the beginning, and then
has weights and cache at once:

- It starts in the engines' turn alone: after ``at_start`` or ``published``, and before ``to_learner`` (whose turn it is
  keeps ``engines_turn.py``, for all devices together). Lost in the learner's turn, its successor waits; other engines
  are given the weights without it.
- It gets its first weights in that turn, too, from the learner at rest. When the turn ends before that it falls asleep
  with the others, and gets those of the publication.
- ``to_learner`` waits until starts and first weights that are under way are through, which have deadlines.
- When no engine is left to publish to (``wait_for_replacement``), the learner leaves the devices as ``at_start``, a
  successor starts, and then both go through ``to_learner`` and ``to_engines`` once more: so the newcomer is in the
  state that the lost one had, and the publication goes on.

An engine that does not do its part of a hand-over (it is gone, it hangs, its device is full) is lost, as one that does
not load its weights is; the others go on. When all of them fail in the same part three times in a row, successors are
no remedy, and the run ends.

Two things are otherwise where the job says so. With ``rollout.freeCacheEngine: false`` engines never sleep: weights and
cache stay through all of it, as with the setting of that name elsewhere, and the learner moves all the same; a
successor starts when it has left. An engine that samples from the learner's own weights (torch engine, one rank) has
nothing to wake but its cache, and the actor stays; it lives and dies with its rank. On a CPU there is only one place:
nobody takes turns.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from rljob_trainer.errors import DeadlineError, EngineError, RLJobError
from rljob_trainer.publish.engines_turn import EnginesTurn
from rljob_trainer.publish.lost_processes import END_SECONDS
from rljob_trainer.publish.quiet import Publication
from rljob_trainer.rollout.actor import EnginePlace
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineHandle
from rljob_trainer.waits import Waits

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedSpec

_TURN_SECONDS = 300.0
"""An engine falls asleep or wakes up by copying its weights between host and device."""
_ATTEMPTS = 3
"""Times that all engines may fail in the same part of a hand-over, one after the other."""


class Turns(Protocol):
    """Hands shared devices from the engines to the learner and back."""

    async def to_learner(self) -> None: ...

    async def to_engines(self) -> None:
        """Engines can take weights, but not sample yet; the learner's actor stays for the publication that follows."""
        ...

    async def published(self) -> None:
        """Engines can sample; the learner has nothing to do until the next batch."""
        ...


class Movable(Protocol):
    """All learner ranks (``RankedLearner``)."""

    async def rest(self, *, actor: bool = True) -> None: ...

    async def wake(self) -> None: ...


class TurnMembers(Protocol):
    """The engines of a run (``RolloutPool``)."""

    @property
    def engines(self) -> Sequence[EngineHandle]: ...

    @property
    def replacing(self) -> int:
        """How many lost ones are being replaced."""
        ...

    @property
    def why_none_is_left(self) -> str:
        """What became of the last one."""
        ...

    def report_lost(self, name: str, reason: str) -> None: ...

    async def wait_for_replacement(self) -> None:
        """While no engine is left: until one has started, or none is being started."""
        ...


def takes_turns(spec: ResolvedSpec) -> bool:
    """Whether ranks and engines share GPUs."""
    return spec.placement == "colocated" and spec.trainer.gpus_per_replica > 0


class SharedDevices:
    """``Turns`` of engines and learner ranks on the same GPUs, in the order that this file begins with."""

    def __init__(
        self,
        pool: TurnMembers,
        learner: Movable,
        engines_turn: EnginesTurn,
        waits: Waits,
        *,
        seconds: float,
        engines_sleep: bool = True,
        actor_stays: bool = False,
        gone: Callable[[EnginePlace], Awaitable[object]] | None = None,
    ) -> None:
        """``engines_turn``: the pool's successors start in it. ``seconds``: what the learner has for a move. ``gone``:
        waits until the processes of a lost engine are no more; None: they are when their actor is.
        ``engines_sleep``: ``rollout.freeCacheEngine``. ``actor_stays``: engines sample from the actor's own
        parameters."""
        self._pool = pool
        self._learner = learner
        self._engines_turn = engines_turn
        self._waits = waits
        self._seconds = seconds
        self._engines_sleep = engines_sleep
        self._actor_stays = actor_stays
        self._gone = gone
        self._failed: Counter[str] = Counter()
        """Of each part of a hand-over, how often it has failed with all engines since it was last done by one."""

    async def at_start(self) -> None:
        """Before the first engine is there."""
        await self._rest(actor=not self._actor_stays)
        self._engines_turn.begin()

    async def to_learner(self) -> None:
        await self._engines_turn.end()
        # What comes next is an update or a checkpoint that is read, and then new weights.
        await self._engines(lambda engine: engine.within(_TURN_SECONDS, EngineLoop.sleep, False), "to free the device")
        with self._waits.wait("trainer", "the learner's state to be moved to the device", self._seconds):
            await self._learner.wake()

    async def to_engines(self) -> None:
        await self._rest(actor=False)
        await self._engines(
            lambda engine: engine.within(_TURN_SECONDS, EngineLoop.wake_weights), "to move its weights to the device"
        )

    async def wait_for_replacement(self) -> None:
        """Between ``to_engines`` and ``published``, while no engine is left: until one has started and is where the
        lost one was, or none is being started any more. Raises ``EngineError`` when one after the other is lost on the
        way."""
        for _ in range(_ATTEMPTS):
            if self._pool.engines or not self._pool.replacing:
                return
            await self.at_start()
            await self._pool.wait_for_replacement()
            if self._pool.engines:
                await self.to_learner()
                await self.to_engines()
        if not self._pool.engines and self._pool.replacing:
            raise EngineError(
                f"{_ATTEMPTS} engines in a row were lost after their start, while the learner had its turn: "
                f"{self._pool.why_none_is_left}"
            )

    async def published(self) -> None:
        await self._rest(actor=not self._actor_stays)
        await self._engines(lambda engine: engine.within(_TURN_SECONDS, EngineLoop.wake), "to take the device")
        self._engines_turn.begin()

    async def _rest(self, *, actor: bool) -> None:
        with self._waits.wait("trainer", "the learner to free the device", self._seconds):
            await self._learner.rest(actor=actor)

    async def _engines(self, move: Callable[[EngineHandle], Awaitable[None]], what: str) -> None:
        """Each has devices of its own: all at once. Raises ``EngineError`` when all are lost and nothing is to be hoped
        of others."""

        async def one(engine: EngineHandle) -> RLJobError | None:
            """Why the engine is lost."""
            try:
                with self._waits.wait("trainer", f"engine {engine.name} {what}", _TURN_SECONDS):
                    await move(engine)
            except (EngineError, DeadlineError) as error:
                self._pool.report_lost(engine.name, str(error))
                await self._end_of(engine)
                return error
            return None

        if not self._engines_sleep:
            return
        errors = await asyncio.gather(*map(one, self._pool.engines))
        lost = [error for error in errors if error is not None]
        if len(lost) < len(errors):
            del self._failed[what]
        if not lost or len(lost) < len(errors):
            return
        self._failed[what] += 1
        if not self._pool.replacing:
            raise EngineError(f"no engine is left {what}: {lost[0]}") from lost[0]
        if self._failed[what] == _ATTEMPTS:
            raise EngineError(
                f"all engines were lost when they were {what}, {_ATTEMPTS} times in a row, the last time because: "
                f"{lost[0]}. If the device is full, lower rollout.engineArgs.gpu_memory_utilization"
            ) from lost[0]

    async def _end_of(self, engine: EngineHandle) -> None:
        """Until a lost engine's process is gone: others need its memory. One beside a rank stays where it is."""
        if engine.place is None:
            return
        with (
            self._waits.wait("trainer", f"lost engine {engine.name} to exit", END_SECONDS),
            suppress(EngineError, DeadlineError),
        ):
            # Ray says that an actor is dead when it begins to end it.
            await engine.within(END_SECONDS, EngineLoop.wait_until_ended)
        if self._gone is not None:
            gone = f"the processes of lost engine {engine.name} to exit"
            with self._waits.wait("trainer", gone, END_SECONDS):
                await self._gone(engine.place)


async def _nothing() -> None:
    """Does nothing: nobody else needs the learner."""


class PublicationInTurns:
    """A publication with which the devices go from the learner to the engines."""

    def __init__(
        self, publication: Publication, turns: Turns, meanwhile: Callable[[], Awaitable[None]] = _nothing
    ) -> None:
        """``meanwhile``: called while the actor is still on the device, for whatever else needs it there."""
        self._publication, self._turns, self._meanwhile = publication, turns, meanwhile

    async def publish(self, version: int) -> dict[str, float]:
        await self._turns.to_engines()
        metrics = await self._publication.publish(version)
        await self._meanwhile()
        await self._turns.published()
        return metrics
