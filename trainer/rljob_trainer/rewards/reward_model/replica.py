"""What computes reward models, one batch at a time: a process beside the driver, or an actor on a node of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rljob_trainer.errors import RewardWorkerError

if TYPE_CHECKING:
    from rljob_trainer.rewards.reward_model.scorer import Row
    from rljob_trainer.rewards.reward_model.served import ServedModel


class ScorerLostError(RewardWorkerError):
    """The process is gone, or does not answer; its rows have to be scored elsewhere."""


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """What came of some rows."""

    scores: Sequence[float | str]
    """A score or a problem for each."""
    tokens: int
    seconds: float
    """Of the computation alone."""


@dataclass(frozen=True, slots=True)
class BatchProblem:
    """Why nothing came of some rows, of a process that can go on."""

    problem: str
    """Type and message of what was raised."""


class ScorerReplica(Protocol):
    """One process with the models. Nothing but ``ended`` and ``kill`` is called while ``scores`` is under way."""

    @property
    def pod(self) -> str | None:
        """Where it is; None: beside the driver."""
        ...

    async def scores(self, model: ServedModel, rows: Sequence[Row]) -> ScoredBatch:
        """Scores rows by a model, which is loaded by then: no rows just load it.

        Raises ``JobFileError`` for what is no reward model, ``ScorerLostError``, and anything else that comes of the
        rows or the computation (``RewardWorkerError`` from another process).
        """
        ...

    async def ended(self) -> str:
        """Returns why, when the process is gone."""
        ...

    async def kill(self) -> None:
        """Ends it. Nothing happens if it is gone already."""
        ...
