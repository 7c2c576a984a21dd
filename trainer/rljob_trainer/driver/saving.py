"""Checkpoints of a run's boundaries: what is saved, what is not, and what happens when the storage does not take it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from rljob_trainer.checkpoints.checkpoint import Checkpoint
from rljob_trainer.control.controls import Controls
from rljob_trainer.driver.parts import Parts
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import BegunTurn
from rljob_trainer.errors import CheckpointError, DeadlineError, OutputError, UnreachableError
from rljob_trainer.record import ledger, unfinished
from rljob_trainer.record.boundary import Boundary

BegunGroups = Mapping[int, Mapping[EpisodeId, BegunTurn]]
"""The tokens of open groups, by ordinal."""

_PAUSE_SECONDS = 1.0
"""Between two questions to a store that does not answer."""


class Saving:
    """Writes boundaries, and knows which was the last."""

    def __init__(self, parts: Parts, controls: Controls) -> None:
        self._parts = parts
        self._standing, self._stop = controls.standing, controls.stop
        self._last: Checkpoint | None = None

    @property
    def last(self) -> Checkpoint | None:
        """The last whole checkpoint of the run, or the one that it goes on from; None: there is none."""
        return self._last

    @property
    def last_in_words(self) -> str:
        step = self._saved_step
        return f"the last checkpoint is that of step {step}" if step else "there is no checkpoint"

    def holds(self, boundary: Boundary) -> bool:
        """Whether nothing would be lost of ``boundary``."""
        return self._parts.checkpoints is None or boundary.totals.step == self._saved_step

    def goes_on_from(self, checkpoint: Checkpoint, version: int) -> None:
        """``checkpoint`` was read; the run's next version comes after ``version``."""
        self._last = checkpoint
        self._standing.checkpointed(checkpoint, version)

    async def save(
        self, boundary: Boundary, begun: Callable[[], Awaitable[BegunGroups]], *, last: bool, must: bool
    ) -> None:
        """Saves ``boundary``, unless it is saved already or an unfinished update has gone beyond it.

        ``begun`` gives the tokens of all groups that are open by then. Weights that may have to be given up are saved
        only as the ``last`` of the job. Raises ``CheckpointError`` and ``OutputError`` when it cannot be written and
        ``must`` be; otherwise the run says so and goes on: a disk that is full now may have room for the next one. For
        a store that does not answer the last one waits.
        """
        parts, step = self._parts, boundary.totals.step
        if parts.checkpoints is None:
            self._settle(boundary)
            return
        if step == self._saved_step:
            return
        if parts.limits.suspect and not last:
            parts.view.message(f"no checkpoint of step {step}: {parts.limits.sentence}; {self.last_in_words}")
            return
        if parts.trainer.busy:
            parts.view.message(
                f"step {step + 1} was interrupted during its update, after the weights had changed, so step {step} can "
                f"no longer be saved: {self.last_in_words} (checkpoint.everySteps)"
            )
            return
        write = functools.partial(
            parts.checkpoints.write,
            step,
            boundary.to_state(),
            functools.partial(parts.learner.save, belongs_to=boundary.owner),
            functools.partial(self._write_groups, boundary, begun),
            parts.fence.check,
        )
        seconds, place = float(parts.job.spec.deadlines.progress_seconds), parts.checkpoints.place
        waiting = parts.waits.wait("trainer", f"the checkpoint of step {step} to be written to {place}", seconds)
        with parts.times.stage("checkpoint"), waiting:
            try:
                async with asyncio.timeout(seconds):
                    written = await (self._patiently(write) if last and must else write())
            except TimeoutError:
                raise DeadlineError(
                    f"writing the checkpoint of step {step} to {place} took longer than {seconds:.0f} s "
                    "(deadlines.progressSeconds). If the storage is slow, raise it; if it hangs, repair it or use "
                    "another one, and start again. Earlier checkpoints are intact."
                ) from None
            except (CheckpointError, OutputError) as error:
                if must:
                    raise
                parts.view.message(f"{error} Training continues; {self.last_in_words}.")
                self._standing.not_saved(str(error))
                return
        self._last = written
        self._standing.checkpointed(written, boundary.totals.version)
        self._settle(boundary)

    def _settle(self, boundary: Boundary) -> None:
        """No process goes back behind ``boundary``."""
        self._parts.rollout.settled({group.ordinal for group in boundary.open}, int(boundary.feed["ordinal"]))

    @property
    def _saved_step(self) -> int:
        return 0 if self._last is None else self._last.step

    async def _patiently(self, write: Callable[[], Awaitable[Checkpoint]]) -> Checkpoint:
        """The checkpoint that ``write`` makes; again and again while the store does not answer and nobody asks to
        stop. Raises what ``write`` raises."""
        told = False
        while True:
            try:
                return await write()
            except UnreachableError as error:
                if self._stop:
                    raise
                if not told:
                    self._parts.view.message(
                        f"{error}: the run waits for the store to save its final state; {self.last_in_words}"
                    )
                told = True
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _write_groups(
        self, boundary: Boundary, begun: Callable[[], Awaitable[BegunGroups]], folder: Path
    ) -> None:
        """The checkpoint's part of open groups and of the ledger."""
        opened = {group.ordinal for group in boundary.open}
        kept = {ordinal: group for ordinal, group in (await begun()).items() if ordinal in opened}
        await asyncio.to_thread(unfinished.write, kept, folder, self._parts.shelf.rest)
        await self._parts.ledger.snapshot(folder / ledger.FILE)
