"""Validations of a run at its steps' boundaries: when one is due, where it runs, and what is still owed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from rljob_trainer.episodes.group import Decode
from rljob_trainer.telemetry.run_folder import VALIDATION_STEP
from rljob_trainer.telemetry.sinks import Sinks
from rljob_trainer.telemetry.timing import StageTimes
from rljob_trainer.validation.beside import ValidationBeside
from rljob_trainer.validation.validator import HeldOutScores, Validator, sample_rows

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedSpec

Owe = Callable[[dict[str, float] | None], None]
"""Told the metrics of a step whose validation is missing in them; None: no longer."""


class ValidationRounds:
    """One run's validations. The metrics of a validation are added to those of the step that it belongs to."""

    def __init__(
        self,
        spec: ResolvedSpec,
        validator: Validator,
        beside: ValidationBeside | None,
        *,
        sinks: Sinks,
        times: StageTimes,
        decode: Decode,
        stops: Callable[[float], bool],
    ) -> None:
        """``beside``: validates while training goes on; None: engines cannot be spared. ``stops``: whether a mean score
        ends the run."""
        self._every, self._rows = spec.validation.every, spec.logging.samples_per_write
        self._validator, self._beside = validator, beside
        self._sinks, self._times, self._decode, self._stops = sinks, times, decode, stops

    async def now(self, step: int, metrics: dict[str, float]) -> float:
        """Validates the present weights, those of ``step``, while training waits; returns the mean score."""
        metrics.pop(VALIDATION_STEP, None)
        with self._times.stage("validation"):
            result = await self._validator.run()
        metrics |= result.metrics
        await self._write_samples(step, result)
        return result.mean

    async def at_boundary(self, step: int, metrics: dict[str, float], owe: Owe, *, last: bool) -> float | None:
        """What there is to validate, now or beside the steps to come. Returns the mean score that became known, if any.

        The ``last`` weights of a job, and those that may be good enough to stop, are validated now. ``owe``: each
        checkpoint of this boundary is to say so until the result is in the record.
        """
        beside, reward = self._beside, None
        due = last or (self._every is not None and self._every > 0 and step % self._every == 0)
        if beside is not None and beside.under_way and (due or beside.done):
            reward = await self._take(beside, metrics)
            last = last or (reward is not None and self._stops(reward))
        if last or due:
            owe(metrics)
        if last or (due and (beside is None or not await beside.begin(step))):
            reward = await self.now(step, metrics)
            owe(None)
        return reward

    async def close(self) -> None:
        """Gives up what is under way, for good."""
        if self._beside is not None:
            await self._beside.close()

    async def _take(self, beside: ValidationBeside, metrics: dict[str, float]) -> float | None:
        with self._times.stage("validation"), beside.waited_for():
            taken = await beside.take()
        if taken is None:
            return None
        step, result = taken
        metrics |= result.metrics | {VALIDATION_STEP: float(step)}
        await self._write_samples(step, result)
        return result.mean

    async def _write_samples(self, step: int, result: HeldOutScores) -> None:
        rows = [
            row
            for groups in result.groups.values()
            for row in sample_rows(groups[: self._rows], self._rows, self._decode)
        ]
        await asyncio.to_thread(self._sinks.samples, step, rows)
