"""Who is in the pool: its engines with what each has in hand, and what there is to say about that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rljob_trainer.rollout.actor import EnginePlace
from rljob_trainer.rollout.handle import EngineHandle
from rljob_trainer.rollout.protocol import GenerationRequest, GenerationResult

MemberState = Literal["joining", "serving", "lent", "leaving"]
"""lent: it answers whoever borrowed it, under the weights it has, and neither the queue nor publications touch it."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What the pool knows of one engine without asking it."""

    name: str
    place: EnginePlace | None
    state: MemberState
    running: int
    """Requests it has in hand."""
    oldest_seconds: float
    """Since the oldest of them was asked for."""
    kept_version: int | None = None
    """The version it keeps while it is lent."""


@dataclass(slots=True, eq=False)
class Pending:
    """A request on its way."""

    request: GenerationRequest
    done: asyncio.Future[GenerationResult]
    since: float = field(default_factory=time.monotonic)

    @property
    def budget(self) -> int:
        """Tokens it may still make."""
        return self.request.sampling.max_tokens - len(self.request.begun)


@dataclass(slots=True, eq=False)
class Member:
    """An engine of the pool."""

    handle: EngineHandle
    state: MemberState = "joining"
    pending: dict[str, Pending] = field(default_factory=dict)
    work: asyncio.Event = field(default_factory=asyncio.Event)
    collector: asyncio.Task[None] | None = None
    kept_version: int | None = None
    """The version whose weights it keeps while it is lent."""

    @property
    def budget(self) -> int:
        return sum(pending.budget for pending in self.pending.values())


class Members(dict[str, Member]):
    """The engines by name."""

    def sorted(self) -> list[Member]:
        """In the order of their names."""
        return [member for _, member in sorted(self.items())]

    @property
    def serving(self) -> list[Member]:
        """Those that get requests."""
        return [member for member in self.sorted() if member.state == "serving"]

    @property
    def own(self) -> list[Member]:
        """Those that are not lent."""
        return [member for member in self.values() if member.state != "lent"]

    @property
    def busy(self) -> bool:
        """Whether any but the lent has something in hand."""
        return any(member.pending for member in self.own)

    def pending(self) -> Iterator[tuple[Pending, Member]]:
        """Every request that an engine which is not lent has in hand."""
        for member in self.own:
            for pending in member.pending.values():
                yield pending, member

    def standings(self) -> list[Standing]:
        """What the pool knows of each."""
        now = time.monotonic()
        return [
            Standing(
                member.handle.name,
                member.handle.place,
                member.state,
                len(member.pending),
                max((now - pending.since for pending in member.pending.values()), default=0.0),
                member.kept_version,
            )
            for member in self.sorted()
        ]

    def waiting_for(self, queued: int, *, paused: bool) -> str:
        """One sentence: what is under way beside ``queued`` requests, and where the oldest request is."""
        pending = list(self.pending())
        if not pending:
            if not queued:
                return "no request is under way"
            why = "the pool is paused" if paused else f"{len(self.serving)} of {len(self)} engines are serving"
            return f"{queued} requests wait for an engine ({why})"
        oldest, member = min(pending, key=lambda item: item[0].since)
        return (
            f"{len(pending)} requests are running and {queued} wait; the oldest ({oldest.request.request_id}, on "
            f"engine {member.handle.name}) was asked for {time.monotonic() - oldest.since:.0f} s ago"
        )
