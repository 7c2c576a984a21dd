"""The pipeline's trainer: a training step and the publication after it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext

from rljob_trainer.episodes.episode import Group
from rljob_trainer.errors import StepGivenUpError
from rljob_trainer.pipeline.parts import TrainedBatch
from rljob_trainer.publish.held_weights import HeldWeights
from rljob_trainer.publish.quiet import Publication
from rljob_trainer.publish.turns import Turns
from rljob_trainer.training.step import TrainingStep
from rljob_trainer.waits import Taken

Announce = Callable[[int, int], Awaitable[None]]
"""Given a version that is about to be published, and the steps that its weights have behind them."""


class PipelineTrainer:
    """What the pipeline calls to train and to publish."""

    def __init__(
        self,
        step: TrainingStep,
        publication: Publication,
        turns: Turns | None = None,
        *,
        undisturbed: Taken = lambda *_: nullcontext(),
        announce: Announce | None = None,
        held: HeldWeights | None = None,
    ) -> None:
        """``turns``: the learner takes the devices for a step; the ``publication`` gives them back.
        ``undisturbed(...)`` waits until no engine that joins is being sent the present weights. ``announce`` is called
        with each version and the steps before it is published; it raises when this driver must not publish any more.
        ``held`` is told which weights the learner has."""
        self._undisturbed, self._announce, self._held = undisturbed, announce, held or HeldWeights()
        self._busy = False
        self._steps = 0
        """Those that the learner's weights have behind them."""
        self._began = self._took = 0.0
        self._step = step
        self._publication = publication
        self._turns = turns

    @property
    def busy(self) -> bool:
        """Whether the learner's weights are being changed, so that they belong to no boundary."""
        return self._busy

    @property
    def seconds_left(self) -> float:
        """Seconds until the update under way ends, if it takes as long as the last one; 0 without one to go by."""
        return max(0.0, self._began + self._took - time.monotonic()) if self._held.updating else 0.0

    async def give_up(self) -> None:
        """Asks that ``train`` raises ``StepGivenUpError`` soon, if that leaves the weights as they were."""
        await self._step.give_up()

    async def train(self, groups: Sequence[Group], *, step: int, version: int) -> TrainedBatch:
        # Stays busy when it is cancelled half-way: what the weights then are, nobody knows.
        between_pulls = self._busy
        # The turn is taken only to become busy, which keeps others away for as long as the update lasts.
        async with self._undisturbed("trainer", f"step {step} begins", 0.0):
            self._busy = True
            self._held.update_begins()
        self._began = time.monotonic()
        if self._turns is not None:
            await self._turns.to_learner()
        try:
            trained = await self._step.run(groups, number=step, version=version)
        except StepGivenUpError:
            self._busy = between_pulls
            self._held.update_given_up()
            raise
        self._steps = step
        self._held.updated(version)
        self._took = time.monotonic() - self._began
        return trained

    async def restore(self, load: Callable[[], Awaitable[None]], version: int, steps: int) -> None:
        """Replaces the learner's weights by those that ``load`` reads, of after ``steps`` steps, and publishes them as
        ``version``."""
        async with self._undisturbed("trainer", "a checkpoint is read", 0.0):
            self._held.replaced()
        await load()
        self._steps = steps
        await self.publish(version)

    async def publish(self, version: int) -> dict[str, float]:
        if self._announce is not None:
            await self._announce(version, self._steps)
        self._held.published_as(version)
        metrics = await self._publication.publish(version)
        self._busy = False
        return metrics
