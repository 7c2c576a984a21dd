"""Validation while training goes on: on engines that the pool lends, which keep the weights of the step they look at.

With one engine, or one that shares its devices with the learner, there is nobody to lend, and training waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rljob_trainer.pools.dispatch import CALL_SECONDS
from rljob_trainer.pools.lent import Lent
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.rollout.handle import EngineLostError
from rljob_trainer.validation.validator import HeldOutScores, Validator
from rljob_trainer.waits import Taken

_SHARE = 4
"""One engine in so many is lent, at least one."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    step: int
    scoring: asyncio.Task[HeldOutScores]


class ValidationBeside:
    """At most one validation at a time, of a step's weights."""

    def __init__(
        self,
        validator: Validator,
        pool: RolloutPool,
        undisturbed: Taken,
        report: Callable[[str], None],
    ) -> None:
        """``undisturbed(...)`` is a time in which no weights are on their way."""
        self._validator, self._pool = validator, pool
        self._undisturbed, self._report = undisturbed, report
        self._now: _UnderWay | None = None
        self._closed = False

    @property
    def under_way(self) -> bool:
        """Whether weights are being validated, or have been and the result waits for ``take``."""
        return self._now is not None

    def waited_for(self) -> AbstractContextManager[object]:
        """Inside, the trainer waits for it."""
        return self._validator.waited_for()

    @property
    def done(self) -> bool:
        """Whether ``take`` need not wait."""
        return self._now is not None and self._now.scoring.done()

    async def begin(self, step: int) -> bool:
        """Starts with the weights that the engines have now; False when none can be spared."""
        assert self._now is None, "take() the one before first"
        async with self._undisturbed("trainer", "engines are lent to validation", 3 * CALL_SECONDS):
            lent = await self._pool.lend(max(1, len(self._pool.serving) // _SHARE))
        if lent is None:
            return False
        self._now = _UnderWay(step, asyncio.create_task(self._score(lent)))
        return True

    async def _score(self, lent: Lent) -> HeldOutScores:
        try:
            return await self._validator.run(lent)
        finally:
            # As soon as they are free, not only when somebody takes the result. At the end of a run they end with the
            # pool: weights that are on their way to another engine must not hold that up.
            if not self._closed:
                async with self._undisturbed("validation", "the engines of a validation return", CALL_SECONDS):
                    lent.give_back()

    async def take(self) -> tuple[int, HeldOutScores] | None:
        """Waits for the step that was validated and the result; None when it was lost with its engines, which the run
        then says.

        Raises ``RewardError`` and ``DeadlineError``.
        """
        now, self._now = self._now, None
        assert now is not None
        try:
            return now.step, await now.scoring
        except EngineLostError as error:
            self._report(f"the validation of step {now.step} failed ({error}); the next one is not affected")
            return None

    async def close(self) -> None:
        """Gives up what is under way, for good."""
        self._closed = True
        if self._now is not None:
            self._now.scoring.cancel()
            await asyncio.gather(self._now.scoring, return_exceptions=True)
            self._now = None
