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

Two things are otherwise where the job says so. With ``rollout.freeCacheEngine: false`` engines never sleep: weights and
cache stay through all of it, as with the setting of that name elsewhere, and the learner moves all the same. An engine
that samples from the learner's own weights (torch engine, one rank) has nothing to wake but its cache, and the actor
stays. On a CPU there is only one place: nobody takes turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from rljob_trainer.publish.quiet import Publication
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineHandle
from rljob_trainer.waits import Waits

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedSpec

_TURN_SECONDS = 300.0
"""An engine falls asleep or wakes up by copying its weights between host and device."""


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
    """All learner ranks (``LearnerGroup``)."""

    async def offload(self, *, actor: bool = True) -> None: ...

    async def onload(self) -> None: ...


class TurnMembers(Protocol):
    """The engines of a run (``RolloutPool``)."""

    @property
    def engines(self) -> Sequence[EngineHandle]: ...


def takes_turns(spec: ResolvedSpec) -> bool:
    """Whether ranks and engines share GPUs."""
    return spec.placement == "colocated" and spec.trainer.gpus_per_replica > 0


class SharedDevices:
    """``Turns`` of engines and learner ranks on the same GPUs, in the order that this file begins with."""

    def __init__(
        self,
        pool: TurnMembers,
        learner: Movable,
        waits: Waits,
        *,
        seconds: float,
        engines_sleep: bool = True,
        actor_stays: bool = False,
    ) -> None:
        """``seconds``: what the learner has for a move. ``engines_sleep``: ``rollout.freeCacheEngine``.
        ``actor_stays``: engines sample from the actor's own parameters."""
        self._pool = pool
        self._learner = learner
        self._waits = waits
        self._seconds = seconds
        self._engines_sleep = engines_sleep
        self._actor_stays = actor_stays

    async def at_start(self) -> None:
        """Before the first engine is there."""
        await self._offload(actor=not self._actor_stays)

    async def to_learner(self) -> None:
        # What comes next is an update or a checkpoint that is read, and then new weights.
        await self._engines(lambda engine: engine.within(_TURN_SECONDS, EngineLoop.sleep, False), "to free the device")
        with self._waits.wait("trainer", "the learner's state on the device", self._seconds):
            await self._learner.onload()

    async def to_engines(self) -> None:
        await self._offload(actor=False)
        await self._engines(
            lambda engine: engine.within(_TURN_SECONDS, EngineLoop.wake_weights), "to take the device for its weights"
        )

    async def published(self) -> None:
        await self._offload(actor=not self._actor_stays)
        await self._engines(lambda engine: engine.within(_TURN_SECONDS, EngineLoop.wake), "to take the device")

    async def _offload(self, *, actor: bool) -> None:
        with self._waits.wait("trainer", "the learner to free the device", self._seconds):
            await self._learner.offload(actor=actor)

    async def _engines(self, move: Callable[[EngineHandle], Awaitable[None]], what: str) -> None:
        """Each has devices of its own: all at once."""

        async def one(engine: EngineHandle) -> None:
            with self._waits.wait("trainer", f"engine {engine.name} {what}", _TURN_SECONDS):
                await move(engine)

        if self._engines_sleep:
            await asyncio.gather(*map(one, self._pool.engines))


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
