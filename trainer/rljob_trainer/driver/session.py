"""The life of a run between its first and its last step: what happens at each step's boundary, and how it stops.

At a boundary nothing of the step is pending: its batch is trained, its weights are published. That is where metrics are
written, validation runs, checkpoints are made and the stop conditions are looked at. A request to stop (a signal)
lets an update that is under way finish, or gives it up if that would take too long, drops what is being generated, and
leaves a checkpoint of the last boundary.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rljob_trainer.aside import aside
from rljob_trainer.checkpoints.checkpoint import Checkpoint, driver_state
from rljob_trainer.control.controls import Controls
from rljob_trainer.control.stop_conditions import Progress
from rljob_trainer.driver.ending import Ending
from rljob_trainer.driver.feeding import RunFeed
from rljob_trainer.driver.parts import Parts
from rljob_trainer.driver.saving import BegunGroups, Saving
from rljob_trainer.driver.step_speed import sequence_lengths
from rljob_trainer.episodes.episode import Group, Prompt
from rljob_trainer.errors import (
    CheckpointError,
    DeadlineError,
    EngineError,
    StepGivenUpError,
)
from rljob_trainer.pipeline.loop import Pipeline, Stage
from rljob_trainer.pipeline.parts import StepRecord
from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings
from rljob_trainer.record import ledger, unfinished
from rljob_trainer.record.boundary import Boundary, OpenGroup, Totals
from rljob_trainer.record.weights import check, published
from rljob_trainer.telemetry.view import ShownStep
from rljob_trainer.validation.validator import sample_rows

_COLLECT_SECONDS = 2.0
"""How long engines may take, then, to hand over what their requests have so far."""
GRACE_SECONDS = 6.0
"""How long an update that is under way may take after a request to stop; the rest of ten seconds is for saving."""


def named_for(mode: str, stage: Stage) -> Stage:
    """``stage``, with the trainer's wait for a batch under the name it has in ``oneStepOff`` as well."""

    @contextlib.contextmanager
    def both(name: str) -> Iterator[None]:
        with stage(name), stage("wait_prev_gen") if name == "generate" else contextlib.nullcontext():
            yield

    return both if mode == "oneStepOff" else stage


class Session:
    """Trains until the job is done or somebody asks to stop. Use ``run`` once."""

    def __init__(self, parts: Parts, controls: Controls) -> None:
        self._parts = parts
        self._controls = controls
        self._stop = controls.stop
        self._end = controls.end
        self._reason = "the data is exhausted"
        self._feed = RunFeed(parts.feed)
        self._saving = Saving(parts, controls)
        self._totals = Totals()
        self._run = uuid.uuid4().hex[:12]
        """Of the run over all its attempts."""
        self._trains = False
        self._boundary: Boundary | None = None
        """The last one; None until the run has begun or gone on."""
        self._restored: list[tuple[Prompt, int]] = []
        """What an earlier process left open, with the versions in which it is to be trained at the latest."""
        self._restored_size = parts.schedule.groups_per_version
        self._begun: BegunGroups | None = None
        """What the open groups had when the pipeline was stopped; None: it runs."""
        self._unwritten: tuple[int, dict[str, float]] | None = None
        """The step whose line is not in the record yet, with its metrics."""
        self._pipeline: Pipeline | None = None
        """None until training begins."""
        self._step_began = time.monotonic()

    @property
    def trains(self) -> bool:
        """Whether training has begun: until then there is nothing to save."""
        return self._trains

    @property
    def totals(self) -> Totals:
        """What has been done until the last boundary, over all attempts."""
        return self._totals

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The last whole one; None: there is none yet."""
        return self._saving.last

    @property
    def overlong_prompts(self) -> int:
        """Prompts that were left out because they are too long."""
        return self._parts.feed.dropped

    # --- the whole

    async def run(self, restored: Checkpoint | None, *, own: bool = True) -> Ending:
        """Raises whatever a part raises; checkpoints that exist stay. ``own``: what is restored is this run's past."""
        reward = None
        if restored is not None:
            await self._restore(restored, own=own)
            reward = await self._make_up_validation() if own else None
        else:
            await self._feed.begin()
            # An attempt before that came to no checkpoint began with the same weights, under the same number.
            goes_on = functools.partial(self._parts.rollout.goes_on_from, {}, (), 0, step=0, version=0, published_as=0)
            await asyncio.to_thread(goes_on)
            await self._publish_first()
            self._boundary = self._present()
        if self._totals.step == 0 and self._parts.job.spec.validation.at_start:
            await self._validate_at_start()
        self._trains = True
        stopped = await self._train(reward)
        await self._write()
        await self._save(last=stopped is None, must=True)
        if stopped is None:
            return Ending("succeeded", self._reason)
        if self._saving.holds(self._settled):
            return stopped
        return replace(stopped, reason=f"{stopped.reason}; {self._saving.last_in_words}")

    async def _publish_first(self) -> None:
        """The model that a job begins with is a version like those to come: nobody serves it without its manifest."""
        if self._parts.engines.turns is not None:
            await self._parts.engines.turns.to_learner()
        await self._parts.trainer.publish(self._totals.version)

    async def _train(self, reward: float | None) -> Ending | None:
        """Runs the pipeline to its end, or until a request to stop, of which the ending then tells. ``reward``: what a
        validation before has found."""
        parts, spec = self._parts, self._parts.job.spec
        if reason := self._end.reason(self._progress(reward)):
            self._reason = reason
            return None
        schedule = self._schedule()
        self._pipeline = Pipeline(
            self._feed,
            parts.rollout,
            parts.trainer,
            schedule,
            after_step=self._after_step,
            keep=parts.keep,
            most_dropped=parts.most_dropped,
            stage=named_for(spec.pipeline.mode, parts.times.stage),
            waits=parts.waits,
            journal=parts.ledger,
            restored=[prompt for prompt, _ in self._restored],
            sample_deadline_seconds=spec.deadlines.progress_seconds,
        )
        steering = self._controls.steering
        steering.steers(schedule, parts.engines.count, parts.scoring)
        self._step_began = time.monotonic()
        training = asyncio.create_task(self._pipeline.run(self._totals.step + 1))
        beside: list[asyncio.Task[Any]] = [asyncio.create_task(self._stop.asked.wait())]
        if parts.engines.count is not None:
            beside.append(asyncio.create_task(parts.engines.count.run()))
        try:
            await asyncio.wait({training, *beside}, return_when=asyncio.FIRST_COMPLETED)
            was_busy = await self._let_update_finish(training)
            if not training.done():
                # With the pipeline goes what its groups have so far.
                if self._begun is None:
                    self._begun = await self._begun_at_the_end()
                if not was_busy:
                    # Meanwhile the last sample of a batch may have come in, and its update may have begun.
                    await self._let_update_finish(training)
                training.cancel()
            with contextlib.suppress(asyncio.CancelledError, StepGivenUpError):
                await training
        finally:
            for task in (training, *beside):
                task.cancel()
            if parts.validations is not None:
                await parts.validations.close()
            for left in await asyncio.gather(*beside, return_exceptions=True):
                if isinstance(left, Exception):
                    raise left
        if self._stop:
            status: Literal["stopped", "suspended"] = "suspended" if self._stop.suspended else "stopped"
            return Ending(status, f"{self._stop.sentence} at step {self._totals.step}", self._stop.signal)
        return None

    async def _let_update_finish(self, training: asyncio.Task[None]) -> bool:
        """Waits for the next boundary if the learner's weights are between two now; whether they were.

        A signal leaves no time for a long update: then the learner is asked to go back to the last boundary, which it
        can until its first optimizer step. The operator waits for the step that is under way.
        """
        if training.done() or not self._parts.trainer.busy:
            return False
        deadlines = self._parts.job.spec.deadlines
        if self._stop.suspended:
            await asyncio.wait({training}, timeout=float(deadlines.progress_seconds))
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                left = self._parts.trainer.seconds_left
                if left > GRACE_SECONDS and not self._saving.holds(self._settled):
                    self._parts.view.message(f"the current update would take {left:.0f} s more, so it is abandoned")
                    # Before the pipeline ends, and with it what its groups have so far.
                    if self._begun is None:
                        self._begun = await self._begun_at_the_end()
                    await self._parts.trainer.give_up()
                await asyncio.wait({training})
        return True

    # --- a step's boundary

    async def _after_step(self, record: StepRecord) -> bool:
        parts, spec = self._parts, self._parts.job.spec
        self._count(record)
        pipeline = self._pipeline
        assert pipeline is not None
        metrics = {name: float(value) for name, value in record.metrics.items()} | parts.pipeline_metrics(pipeline)
        try:
            metrics |= parts.limits.look(record.step, record.apart)
        finally:
            self._controls.standing.apart(parts.limits.sentence)
        self._unwritten = (record.step, metrics)
        self._boundary = self._present()
        parts.ledger.write()
        # Without held-out sets the step's own samples say how good the policy is.
        reason = self._end.reason(self._progress(None if parts.validations else mean_score(record.groups)))
        if reason is None and await pipeline.read(self._feed.exhausted()) and not pipeline.open_prompts:
            reason = "the data is exhausted"
        await self._write_generations(record, last=reason is not None)
        try:
            if parts.validations is not None:
                reward = await parts.validations.at_boundary(record.step, metrics, self._owe, last=reason is not None)
                reason = reason or self._end.reason(self._progress(reward))
        finally:
            now = time.monotonic()
            seconds, self._step_began = now - self._step_began, now
            metrics |= parts.speed.of(record.groups, metrics, seconds)
        # Before the checkpoint: who is killed in between does the step again; who resumed from it would not write it.
        await self._write()
        if reason is not None or self._stop or self._is_due(spec.checkpoint.every_steps, record.step):
            last = reason is not None
            await self._save(last=last, must=last or bool(self._stop))
        self._reason = reason or self._reason
        return reason is None and not self._stop

    def _count(self, record: StepRecord) -> None:
        before, groups = self._totals, record.groups
        self._totals = Totals(
            step=record.step,
            version=record.version,
            groups=before.groups + len(groups),
            samples=before.samples + sum(len(group.episodes) for group in groups),
            tokens=before.tokens + sum(sum(sequence_lengths(group)) for group in groups),
            response_tokens=before.response_tokens + sum(group.response_tokens for group in groups),
            seconds=before.seconds + time.monotonic() - self._step_began,
        )

    async def _write(self) -> None:
        """Hands the step that just ended to sinks and view."""
        if self._unwritten is None:
            return
        (step, metrics), self._unwritten = self._unwritten, None
        totals = self._totals
        progress = {
            "progress/step": totals.step,
            "progress/version": totals.version,
            "progress/epoch": self._parts.epoch(),
            "progress/groups": totals.groups,
            "progress/samples": totals.samples,
            "progress/tokens": totals.tokens,
            "progress/seconds": totals.seconds,
        }
        # A step that is written anew has its own already.
        metrics |= progress | metrics
        self._parts.view.step(ShownStep(step, metrics))
        await asyncio.to_thread(self._parts.sinks.step, step, metrics)

    async def _write_generations(self, record: StepRecord, *, last: bool) -> None:
        """For people: what the first weights make and what the last step's made, whatever came between or not."""
        spec, step = self._parts.job.spec, record.step
        if spec.logging.samples_every == 0:
            return
        if step == 1 and not (self._parts.validations and spec.validation.at_start):
            step = 0  # of weights that no step has changed, as those of a validation at the start
        elif not last and not self._is_due(spec.logging.samples_every, step):
            return
        rows = sample_rows(record.groups, spec.logging.samples_per_write, self._parts.decode)
        await asyncio.to_thread(self._parts.sinks.samples, step, rows)

    def _progress(self, reward: float | None) -> Progress:
        return Progress(self._totals.step, self._totals.samples, self._totals.seconds, reward)

    @staticmethod
    def _is_due(every: int | None, step: int) -> bool:
        return every is not None and every > 0 and step % every == 0

    # --- validation

    async def _validate_at_start(self) -> None:
        if self._parts.validations is None:
            return
        metrics: dict[str, float] = {}
        await self._parts.validations.now(0, metrics)
        self._parts.view.step(ShownStep(0, metrics))
        await asyncio.to_thread(self._parts.sinks.step, 0, metrics)
        self._parts.times.lap()

    async def _make_up_validation(self) -> float | None:
        """The validation of the restored step, if a signal kept an earlier process from it; its line is written anew,
        with the result. Returns the mean score."""
        metrics = self._settled.unvalidated
        if metrics is None or self._parts.validations is None:
            return None
        reward = await self._parts.validations.now(self._totals.step, metrics)
        self._owe(None)
        self._unwritten = self._totals.step, metrics
        await self._write()
        self._parts.times.lap()
        return reward

    def _owe(self, metrics: dict[str, float] | None) -> None:
        """The validation of this boundary is missing in its step's ``metrics``; None: no longer."""
        self._boundary = replace(self._settled, unvalidated=metrics)

    # --- state

    @property
    def _settled(self) -> Boundary:
        """The last boundary of a run that has begun."""
        assert self._boundary is not None
        return self._boundary

    def _present(self) -> Boundary:
        """The boundary that the run is at now."""
        return Boundary(
            run=self._run,
            totals=self._totals,
            model=self._parts.model,
            feed=self._feed.state_dict(),
            open=tuple(OpenGroup(p.ordinal, p.epoch, p.source, p.row, deadline) for p, deadline in self._open()),
            groups_per_version=self._schedule_settings().groups_per_version,
            training=self._parts.step.state_dict(),
            corpora=self._parts.corpora,
            weights=published(self._parts.engines.pool.published, self._parts.dtype),
        )

    def _schedule(self) -> Schedule:
        """The schedule, with the groups that an earlier process left open under its own size of a version."""
        settings = self._parts.schedule
        if not self._restored:
            return Schedule(settings, self._totals.version)
        # Another size of a pull cannot be brought about step by step; the bound then holds for what comes.
        size = settings.groups_per_version if self._restored_size % settings.groups_per_pull else self._restored_size
        schedule = Schedule(replace(settings, groups_per_version=size), self._totals.version)
        for prompt, deadline in self._restored:
            schedule.restored(prompt.ordinal, deadline)
        if size != settings.groups_per_version:
            schedule.change(settings)
        return schedule

    def _schedule_settings(self) -> ScheduleSettings:
        return self._parts.schedule if self._pipeline is None else self._pipeline.schedule.settings

    def _open(self) -> list[tuple[Prompt, int]]:
        """Prompts that were handed out and are neither trained nor dropped, with their deadlines."""
        pipeline = self._pipeline
        if pipeline is None:
            return self._restored
        return [(prompt, pipeline.schedule.deadline(prompt.ordinal)) for prompt in pipeline.open_prompts]

    async def _begun_at_the_end(self) -> BegunGroups:
        """Like ``_begun_groups``, from engines that may not answer: what cannot be had soon is made again."""
        try:
            async with asyncio.timeout(_COLLECT_SECONDS):
                return await self._begun_groups()
        except (TimeoutError, EngineError, DeadlineError) as error:
            self._parts.view.message(
                f"tokens of running samples are lost ({error or 'no answer'}) and will be generated again"
            )
            return {}

    async def _begun_groups(self) -> BegunGroups:
        """The tokens of all open groups, finished or not."""
        begun = await self._parts.rollout.begun()
        for group in [] if self._pipeline is None else self._pipeline.finished_groups:
            begun[group.prompt.ordinal] = self._parts.rollout.kept(group.episodes)
        return begun

    async def _restore(self, checkpoint: Checkpoint, *, own: bool) -> None:
        """Goes on from ``checkpoint``: with its weights and optimizer, its place in the data, its open groups and its
        counts. Of another run's (not ``own``) stay behind its name, a validation that it still owed, and what it had
        changed by other settings than this job's."""
        files = await asyncio.to_thread(checkpoint.files)
        read = Boundary.of(await asyncio.to_thread(driver_state, files), checkpoint.place)
        if own:
            read.check_corpora(self._parts.corpora, checkpoint.place)
        self._totals = read.totals
        self._run = read.run if own else self._run
        try:
            await aside(lambda: self._parts.feed.load_state_dict(dict(read.feed)))
            self._parts.step.load_state_dict(read.training, own=own)
            next_ordinal = int(read.feed["ordinal"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint {checkpoint.place} was written by another version: {error!r}") from error
        self._feed = RunFeed(self._parts.feed)
        self._parts.limits.resumed(correcting=self._parts.step.correcting)
        # Versions that were published after the checkpoint are gone, and their numbers with them.
        used = await self._parts.ledger.roll_back(
            files / ledger.FILE,
            step=self._totals.step,
            next_ordinal=next_ordinal,
            again=[group.ordinal for group in read.open],
        )
        if self._parts.ledger.fresh:  # the one of the last attempt was lost with its node
            used = max(used, self._parts.fence.versions)
        self._check_ledger(files, checkpoint)
        version = read.totals.version if used <= read.totals.version else used + 1
        later = version - read.totals.version
        self._totals = replace(read.totals, version=version)
        feed = self._parts.feed
        self._restored = await aside(
            lambda: [
                (feed.prompt_at(ordinal=g.ordinal, epoch=g.epoch, source=g.source, row=g.row), g.deadline + later)
                for g in read.open
            ]
        )
        begun = await asyncio.to_thread(
            unfinished.read,
            files,
            versions_later=later,
            keep=self._parts.shelf.put,
            report=self._parts.view.message,
        )
        await asyncio.to_thread(
            self._parts.rollout.goes_on_from,
            begun,
            {group.ordinal for group in read.open},
            next_ordinal,
            step=read.totals.step,
            version=read.totals.version,
            published_as=version,
        )
        self._restored_size = read.groups_per_version
        self._boundary = replace(self._present(), weights=read.weights, unvalidated=read.unvalidated if own else None)
        self._saving.goes_on_from(checkpoint, version)
        if self._parts.engines.turns is not None:
            await self._parts.engines.turns.to_learner()
        load = functools.partial(self._read_learner, checkpoint, read.owner)
        await self._parts.trainer.restore(load, version, read.totals.step)
        check(read.weights, published(self._parts.engines.pool.published, self._parts.dtype), checkpoint.place)

    async def _read_learner(self, checkpoint: Checkpoint, belongs_to: str) -> None:
        seconds = float(self._parts.job.spec.deadlines.progress_seconds)
        with self._parts.waits.wait("driver", f"the learner to read {checkpoint.place}", seconds):
            await self._parts.learner.load(checkpoint.learner, belongs_to)

    def _check_ledger(self, files: Path, checkpoint: Checkpoint) -> None:
        """Raises ``CheckpointError`` when the ledger knows of other trained groups than the driver's part."""
        trained = self._parts.ledger.account.trained.groups
        if (files / ledger.FILE).exists() and trained != self._totals.groups:
            raise CheckpointError(
                f"the ledger in checkpoint {checkpoint.place} has {trained} trained groups, but {self._totals.groups} "
                f"groups were trained up to its step {self._totals.step}: it belongs to another step or run. Use an "
                "unmodified checkpoint"
            )

    async def _save(self, *, last: bool, must: bool) -> None:
        """Saves the last boundary (``Saving.save``)."""

        async def begun() -> BegunGroups:
            return await self._begun_groups() if self._begun is None else self._begun

        await self._saving.save(self._settled, begun, last=last, must=must)


def mean_score(groups: Sequence[Group]) -> float | None:
    """The mean score of all episodes that have a reward; None: none has."""
    scores = [episode.reward.score for group in groups for episode in group.episodes if episode.reward is not None]
    return sum(scores) / len(scores) if scores else None
