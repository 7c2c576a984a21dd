"""Who is in the pool: its engines with what each has in hand, and what there is to say about that."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.receipts import receipt_of
from rljob_trainer.episodes.requests import (
    Finished,
    GenerationRequest,
    GenerationResult,
    brought_along,
    continued,
)
from rljob_trainer.rollout.actor import EnginePlace
from rljob_trainer.rollout.handle import EngineHandle
from rljob_trainer.weights.manifest import Version

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
    """Since the oldest of them began to run."""
    kept_version: int | None = None
    """The version it keeps while it is lent."""


@dataclass(frozen=True, slots=True)
class LostEngine:
    """An engine that was lost."""

    name: str
    reason: str
    has_answered: bool
    """Whether it had finished any request."""


@dataclass(slots=True, eq=False)
class Pending:
    """A request on its way."""

    request: GenerationRequest
    done: asyncio.Future[GenerationResult]
    finished: Callable[[GenerationResult], None] | None = None
    """To be told of the result before those who wait for ``done`` are."""
    since: float = field(default_factory=time.monotonic)
    running_since: float | None = None
    """Since when an engine has it; interruptions count, what was lost with an engine does not. None: it waits."""
    is_cut: bool = False
    """Whether it is to end with what it has, or with one token."""

    def begun_with(self, partial: GenerationResult) -> None:
        """It goes on where ``partial`` stopped."""
        self.request = continued(self.request, partial)

    def starts_over(self) -> None:
        """Its engine is lost, and what it ran for there does not count."""
        self.running_since = None

    def placed(self) -> None:
        """An engine has it in hand from now on."""
        if self.running_since is None:
            self.running_since = time.monotonic()

    def cut(self) -> GenerationResult | None:
        """No engine has it, and it is to end: what it came to; None: it has nothing yet, and asks for one token."""
        self.is_cut = True
        if len(self.request.begun):
            result = brought_along(self.request, "deadline")
            result.receipt = receipt_of(self.request, result.tokens)
            result.seconds = time.monotonic() - self.since
            return result
        self.request = replace(self.request, sampling=replace(self.request.sampling, max_tokens=1))
        return None

    @property
    def running_seconds(self) -> float:
        return 0.0 if self.running_since is None else time.monotonic() - self.running_since

    @property
    def budget(self) -> int:
        """Tokens it may still make."""
        return self.request.sampling.max_tokens - len(self.request.begun)


def pending_of(requests: Sequence[GenerationRequest], finished: Finished | None = None) -> list[Pending]:
    """A group on its way."""
    loop = asyncio.get_running_loop()
    return [
        Pending(request, loop.create_future(), finished and functools.partial(finished, position))
        for position, request in enumerate(requests)
    ]


@dataclass(slots=True, eq=False)
class Member:
    """An engine of the pool."""

    handle: EngineHandle
    state: MemberState = "joining"
    holds: Version | None = None
    """Whose manifest it has; None: nothing was delivered to it."""
    pending: dict[EpisodeId, Pending] = field(default_factory=dict)
    work: asyncio.Event = field(default_factory=asyncio.Event)
    followers: list[asyncio.Task[None]] = field(default_factory=list)
    """What collects its results, and what waits for its death."""
    kept_version: int | None = None
    """The version whose weights it keeps while it is lent."""
    has_answered: bool = False
    """Whether it has finished any request."""

    def answers(self) -> None:
        """It has finished a request."""
        self.has_answered = True

    def joins(self) -> None:
        """It gets no requests until it ``serves``."""
        self.state = "joining"

    def serves(self) -> None:
        """It gets requests from now on."""
        self.state = "serving"

    def leaves(self) -> None:
        """It gets no requests any more, and no weights."""
        self.state = "leaving"

    def is_lent(self, version: int) -> None:
        """It answers its borrower alone, with the weights of ``version``."""
        self.state, self.kept_version = "lent", version

    def comes_home(self) -> int | None:
        """It was given back; the version whose weights it has."""
        kept, self.kept_version = self.kept_version, None
        self.joins()
        return kept

    def was_given(self, version: Version) -> None:
        """It holds the manifest of ``version``."""
        self.holds = version

    def unfollow(self) -> None:
        """Ends the followers, except for the one that asks for it."""
        for task in self.followers:
            if task is not asyncio.current_task():
                task.cancel()

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
        """The members that get requests."""
        return [member for member in self.sorted() if member.state == "serving"]

    @property
    def own(self) -> list[Member]:
        """The members that are not lent."""
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
        return [
            Standing(
                member.handle.name,
                member.handle.place,
                member.state,
                len(member.pending),
                max((pending.running_seconds for pending in member.pending.values()), default=0.0),
                member.kept_version,
            )
            for member in self.sorted()
        ]

    def waiting_for(self, queued: int, *, paused: bool) -> str:
        """In a few words: where the oldest request runs, and why ``queued`` others do not; empty: there are none."""
        said = []
        oldest = max(self.pending(), key=lambda item: item[0].running_seconds, default=None)
        if oldest is not None:
            pending, member = oldest
            said.append(f"oldest running {pending.running_seconds:.0f} s on engine {member.handle.name}")
        if queued:
            serving = len(self.serving)
            why = "the pool is paused" if paused else f"{serving} of {len(self)} engines are serving"
            said.append(f"{queued} requests wait for an engine ({why}{', all full' if serving and not paused else ''})")
        return "; ".join(said)
