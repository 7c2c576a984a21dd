"""Rows on their way to a reward model: they wait by model, and are handed out in shares."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rljob_trainer.rewards.terms import RewardFailure

if TYPE_CHECKING:
    from rljob_trainer.rewards.reward_model.replica import ScoredBatch
    from rljob_trainer.rewards.reward_model.scorer import Row

_TRIES = 3
_MOST_ROWS = 512
_MOST_CHARACTERS = 1 << 16
"""In one batch: what a replica is at when others come is waited for, and what is lost with it is done again."""
_AROUND = 64
"""Characters that a chat template adds to a row, or so."""

Said = float | str | RewardFailure
"""A score, what is wrong with the row, or why nobody has scored it."""


@dataclass(slots=True, eq=False)
class WaitingRow:
    """One row, until it is answered."""

    row: Row
    size: int
    """Characters, which are to tokens what they are in all other rows, more or less."""
    done: asyncio.Future[Said]
    since: float = field(default_factory=time.monotonic)
    losses: int = 0
    alone: bool = False
    """It was in a batch that raised, so it shares no other."""

    def lost(self) -> int:
        """Counts a replica that was lost with it."""
        self.losses += 1
        return self.losses

    def keeps_to_itself(self) -> None:
        self.alone = True

    def may_join(self, others: Sequence[WaitingRow]) -> bool:
        """Whether it may be in one batch with these."""
        return not others or not (self.alone or others[0].alone)


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of one model that a replica has in hand."""

    model: str
    rows: Sequence[WaitingRow]
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class RowCounts:
    """What was done for one model."""

    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    taken: int = 0
    waited: float = 0.0
    """Seconds, of all rows that were taken."""
    longest: float = 0.0
    most: int = 0
    """Rows that waited at once."""
    losses: int = 0
    """Replicas that were lost with rows in hand."""

    def put(self, waiting: int) -> None:
        """So many wait now."""
        self.most = max(self.most, waiting)

    def took(self, seconds: Sequence[float]) -> None:
        """Rows that had waited for so long."""
        self.taken += len(seconds)
        self.waited += sum(seconds)
        self.longest = max(self.longest, *seconds)

    def answered(self, answer: ScoredBatch) -> None:
        self.rows += len(answer.scores)
        self.tokens += answer.tokens
        self.seconds += answer.seconds

    def lost(self) -> None:
        self.losses += 1


class RowQueue:
    """Rows that nobody has taken yet, by model."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        """``arrived`` is called when there is something to take."""
        self._arrived = arrived
        self._waiting: dict[str, deque[WaitingRow]] = {}
        self._counts: dict[str, RowCounts] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, model: str, row: Row) -> asyncio.Future[Said]:
        """The row's answer, which may be cancelled."""
        size = _AROUND + sum(len(message["content"]) for message in row)
        waiting = WaitingRow(row, size, asyncio.get_running_loop().create_future())
        queue = self._waiting.setdefault(model, deque())
        queue.append(waiting)
        self._counts_of(model).put(len(queue))
        self._arrived()
        return waiting.done

    def take(self, takers: int) -> RowBatch | None:
        """A fair share for one of so many, of the model whose first row has waited longest: about as many tokens as
        each of the others gets. None: nothing waits that somebody still wants."""
        for queue in self._waiting.values():
            while queue and queue[0].done.done():
                queue.popleft()
        model = min(
            (name for name, queue in self._waiting.items() if queue),
            key=lambda name: self._waiting[name][0].since,
            default=None,
        )
        if model is None:
            return None
        queue = self._waiting[model]
        share = min(_MOST_CHARACTERS, sum(waiting.size for waiting in queue) / max(1, takers))
        taken: list[WaitingRow] = []
        size = 0
        while queue and len(taken) < _MOST_ROWS and (not taken or size + queue[0].size <= share):
            if not queue[0].may_join(taken):
                break
            waiting = queue.popleft()
            if not waiting.done.done():
                taken.append(waiting)
                size += waiting.size
        now = time.monotonic()
        self._counts_of(model).took([now - waiting.since for waiting in taken])
        return RowBatch(model, taken)

    def answer(self, batch: RowBatch, answer: ScoredBatch) -> None:
        """Hands out what a replica has said."""
        self._counts_of(batch.model).answered(answer)
        for waiting, score in zip(batch.rows, answer.scores, strict=True):
            if not waiting.done.done():
                waiting.done.set_result(score)

    def ask_again(self, batch: RowBatch, problem: str, remedy: str) -> None:
        """The replica was lost: others take the rows first, but for those that have seen too many die."""
        self._counts_of(batch.model).lost()
        for waiting in reversed(batch.rows):
            if waiting.lost() < _TRIES:
                self._waiting[batch.model].appendleft(waiting)
            elif not waiting.done.done():
                problem_of = f"the process of the reward model was lost {_TRIES} times: {problem}; {remedy}"
                waiting.done.set_result(RewardFailure(batch.model, problem_of, ended=True, lost=True))
        self._arrived()

    def blame(self, batch: RowBatch, problem: str) -> None:
        """The batch raised: a row that was alone has no score; of several, each is asked again alone and first, so
        that those have a score whose doing it was not."""
        if len(batch.rows) > 1:
            for waiting in reversed(batch.rows):
                waiting.keeps_to_itself()
                self._waiting[batch.model].appendleft(waiting)
            self._arrived()
            return
        for waiting in batch.rows:
            if not waiting.done.done():
                waiting.done.set_result(RewardFailure(batch.model, f"the reward model fails on it: {problem}"))

    def refuse(self, batch: RowBatch, error: Exception) -> None:
        """Ends these rows with an error: they will not be scored."""
        for waiting in batch.rows:
            if not waiting.done.done():
                waiting.done.set_exception(error)

    def refuse_all(self, error: Exception) -> None:
        """Ends all rows that wait now with an error: they will not be scored."""
        while (batch := self.take(1)) is not None:
            self.refuse(batch, error)

    def cancel(self) -> None:
        """Cancels what waits, as the one who asked is gone."""
        for queue in self._waiting.values():
            while queue:
                queue.popleft().done.cancel()

    def take_counts(self, model: str) -> RowCounts:
        """What was done since the last call."""
        return self._counts.pop(model, None) or RowCounts()

    def _counts_of(self, model: str) -> RowCounts:
        return self._counts.setdefault(model, RowCounts())
