"""The pipeline's trainer: a training step and the publication after it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import nullcontext

from rljob_trainer.episodes.episode import Group
from rljob_trainer.errors import StepGivenUpError
from rljob_trainer.publish.quiet import Publication
from rljob_trainer.publish.turns import Turns
from rljob_trainer.training.step import TrainingStep
from rljob_trainer.waits import Taken


class PipelineTrainer:
    """What the pipeline calls to train and to publish."""

    def __init__(
        self,
        step: TrainingStep,
        publication: Publication,
        turns: Turns | None = None,
        *,
        undisturbed: Taken = lambda *_: nullcontext(),
    ) -> None:
        """``turns``: the learner takes the devices for a step; the ``publication`` gives them back.
        ``undisturbed(...)`` waits until no engine that joins is being sent the present weights."""
        self._undisturbed = undisturbed
        self.announce: Callable[[int], Awaitable[None]] = _to_nobody
        """Called with each version before it is published; raises when this driver must not publish any more."""
        self.busy = False
        """Whether the learner's weights are being changed, so that they belong to no boundary."""
        self._updating = False
        """Whether that happens just now, or was cut off."""
        self._present: int | None = 0
        """The version that the learner's weights are, or are being published as; None between an update and that."""
        self._first: int | None = None
        """The version that the last update belonged to, with whose weights it began."""
        self._began = self._took = 0.0
        self._step = step
        self._publication = publication
        self._turns = turns

    @property
    def holds(self) -> Collection[int]:
        """The versions whose weights the learner has: that of its present ones, and that of those which it kept when
        the last version began. Between two pulls of a version only the latter; none while it updates.

        Which of them engines are to have is the pool's to say: when a publication is through, the kept ones are the
        former version's.
        """
        if self._updating:
            return ()
        versions = (self._present, self._first if self._step.keeps_first_weights else None)
        return [version for version in versions if version is not None]

    @property
    def seconds_left(self) -> float:
        """Of the update that is under way, if it takes as long as the last one; 0 without one to go by."""
        return max(0.0, self._began + self._took - time.monotonic()) if self._updating else 0.0

    async def give_up(self) -> None:
        """Asks that ``train`` raises ``StepGivenUpError`` soon, if that leaves the weights as they were."""
        await self._step.give_up()

    async def train(self, groups: Sequence[Group], *, step: int, version: int) -> dict[str, float]:
        # Stays busy when it is cancelled half-way: what the weights then are, nobody knows.
        # Held for no time: from then on ``busy`` keeps others away.
        between_pulls, present = self.busy, self._present
        async with self._undisturbed("trainer", f"step {step} begins", 0.0):
            self.busy = self._updating = True
            self._present = None
        self._began = time.monotonic()
        if self._turns is not None:
            await self._turns.to_learner()
        try:
            metrics = await self._step.run(groups, number=step, version=version)
        except StepGivenUpError:
            self.busy, self._updating, self._present = between_pulls, False, present
            raise
        self._updating, self._first = False, version
        self._took = time.monotonic() - self._began
        return metrics

    async def restore(self, load: Callable[[], Awaitable[None]], version: int) -> None:
        """Replaces the learner's weights by those that ``load`` reads, and publishes them as ``version``."""
        async with self._undisturbed("trainer", "a checkpoint is read", 0.0):
            self._present = self._first = None
        await load()
        await self.publish(version)

    async def publish(self, version: int) -> dict[str, float]:
        await self.announce(version)
        self._present = version
        metrics = await self._publication.publish(version)
        self.busy = False
        return metrics


async def _to_nobody(version: int) -> None:
    """Nobody follows the versions."""
