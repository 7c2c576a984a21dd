"""Engines that were borrowed from a pool, for validation beside training."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rljob_trainer.episodes.requests import Finished, GenerationRequest, GenerationResult
from rljob_trainer.pools.members import Member
from rljob_trainer.rollout.handle import EngineLostError


@dataclass(frozen=True, slots=True)
class Lent:
    """They answer whoever holds this under the weights that they had when they were lent, and nobody else."""

    members: Sequence[Member]
    ask: Callable[[Member, Sequence[GenerationRequest], Finished | None], Awaitable[list[GenerationResult]]]
    take_home: Callable[[Member], None]

    async def generate(
        self, requests: Sequence[GenerationRequest], finished: Finished | None = None
    ) -> list[GenerationResult]:
        """The results in the order of the requests; ``finished`` is called with each and its position.

        Raises ``EngineLostError`` when the engine they are given to is lost, or all are.
        """
        here = [member for member in self.members if member.state == "lent"]
        if not here:
            raise EngineLostError("the engines lent to validation are lost")
        return await self.ask(min(here, key=lambda member: member.budget), requests, finished)

    def waiting_for(self) -> str:
        """One sentence: what is under way."""
        return ", ".join(f"engine {m.handle.name} has {len(m.pending)} requests" for m in self.members)

    def give_back(self) -> None:
        """They serve the pool again as soon as they have its weights. Not while a publication is under way."""
        for member in self.members:
            self.take_home(member)
