"""What is known of a pool that scores, of whatever kind: how many replicas there are, what each does, which left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

ReplicaState = Literal["starting", "serving", "leaving"]


@dataclass(frozen=True, slots=True)
class ScorerStanding:
    """What is known of one replica without asking it."""

    name: str
    pod: str | None
    state: ReplicaState
    running: int
    """Samples it has in hand."""
    seconds: float
    """Since it has the oldest of them."""


@dataclass(frozen=True, slots=True)
class GoneScorer:
    """A replica that has left; its pod is not needed any more."""

    name: str
    pod: str


class ScoringPool(Protocol):
    """Replicas that score, as many as are wanted."""

    @property
    def wanted(self) -> int: ...

    @property
    def waiting(self) -> int:
        """Samples that no replica has taken yet."""
        ...

    @property
    def drained(self) -> Sequence[GoneScorer]:
        """Replicas that left, and whose pods no other one uses."""
        ...

    def standings(self) -> Sequence[ScorerStanding]:
        """What is known of each replica."""
        ...

    def want(self, count: int) -> None:
        """Changes ``wanted``, at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class ScoringPools:
    """The pools of a job that score; None: it has none of the kind."""

    reward_model: ScoringPool | None = None
    judge: ScoringPool | None = None


NO_POOLS = ScoringPools()
