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
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from rljob_trainer.aside import aside
from rljob_trainer.checkpoints.checkpoint import Checkpoint, driver_state
from rljob_trainer.control.controls import Controls
from rljob_trainer.control.stop_conditions import Progress
from rljob_trainer.driver.ending import Ending
from rljob_trainer.driver.feeding import RunFeed
from rljob_trainer.driver.parts import Parts
from rljob_trainer.driver.step_speed import sequence_lengths
from rljob_trainer.episodes.episode import Prompt
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import BegunTurn
from rljob_trainer.errors import (
    CheckpointError,
    DeadlineError,
    EngineError,
    OutputError,
    StepGivenUpError,
    UnreachableError,
)
from rljob_trainer.pipeline.loop import Pipeline, Stage
from rljob_trainer.pipeline.parts import StepRecord
from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings
from rljob_trainer.record import ledger, start_model, unfinished, weights
from rljob_trainer.telemetry.run_folder import VALIDATION_STEP
from rljob_trainer.telemetry.view import StepRecord as ShownStep
from rljob_trainer.validation.beside import ValidationBeside
from rljob_trainer.validation.validator import ValidationResult, sample_rows

_COLLECT_SECONDS = 2.0
"""How long engines may take, then, to hand over what their requests have so far."""
GRACE_SECONDS = 6.0
"""How long an update that is under way may take after a request to stop; the rest of ten seconds is for saving."""
_PAUSE_SECONDS = 1.0
"""Between two questions to a store that does not answer."""


@dataclass(slots=True)
class Totals:
    """What has been done since the run began, over all restarts."""

    step: int = 0
    version: int = 0
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    response_tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Totals:
        return cls(**{field.name: state[field.name] for field in fields(cls)})


def named_for(mode: str, stage: Stage) -> Stage:
    """``stage``, with the trainer's wait for a batch under the name it has in ``oneStepOff`` as well."""

    @contextlib.contextmanager
    def both(name: str) -> Iterator[None]:
        with stage(name), stage("wait_prev_gen") if name == "generate" else contextlib.nullcontext():
            yield

    return both if mode == "oneStepOff" else stage


def _owner(state: Mapping[str, Any]) -> str:
    """In words, what the parts of a checkpoint with this driver's state belong to."""
    return f"run {state['run']}, step {state['step']}"


class Session:
    """Trains until the job is done or somebody asks to stop. Use ``run`` once."""

    def __init__(self, parts: Parts, controls: Controls) -> None:
        self.parts = parts
        self.totals = Totals()
        self.checkpoint: Checkpoint | None = None
        self.trains = False
        """Whether training has begun: until then there is nothing to save."""
        self._controls = controls
        self._stop = controls.stop
        self._end = controls.end
        self._reason = "the data is exhausted"
        self._feed = RunFeed(parts.feed)
        self._boundary: dict[str, Any] = {}
        self._restored: list[tuple[Prompt, int]] = []
        self._restored_size = parts.schedule.groups_per_version
        self._begun: dict[int, dict[EpisodeId, BegunTurn]] | None = None
        parts.trainer.announce = self._announce
        self._unwritten: tuple[int, dict[str, float]] | None = None
        self._pipeline: Pipeline | None = None
        self._step_began = time.monotonic()
        self._run = uuid.uuid4().hex[:12]
        """Of the run over all its attempts: binds the parts of a checkpoint together."""

    # --- the whole

    async def run(self, restored: Checkpoint | None, *, own: bool = True) -> Ending:
        """Raises whatever a part raises; checkpoints that exist stay. ``own``: what is restored is this run's past."""
        reward = None
        if restored is not None:
            await self._restore(restored, own=own)
            reward = await self._make_up_validation() if own else None
        else:
            await self._feed.begin()
            await self._publish_first()
            self._boundary = self._state()
        if self.totals.step == 0 and self.parts.job.spec.validation.at_start:
            await self._validate_at_start()
        self.trains = True
        stopped = await self._train(reward)
        await self._write()
        await self._checkpoint_boundary(last=stopped is None, must=True)
        if stopped is None:
            return Ending("succeeded", self._reason)
        return stopped if self._is_saved else replace(stopped, reason=f"{stopped.reason}; {self._last_saved}")

    async def _publish_first(self) -> None:
        """The model that a job begins with is a version like those to come: nobody serves it without its manifest."""
        if self.parts.engines.turns is not None:
            await self.parts.engines.turns.to_learner()
        await self.parts.trainer.publish(self.totals.version)

    async def _train(self, reward: float | None) -> Ending | None:
        """Runs the pipeline to its end, or until a request to stop, of which the ending then tells. ``reward``: what a
        validation before has found."""
        parts, spec = self.parts, self.parts.job.spec
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
        steering.steers(schedule, parts.engines.count)
        self._step_began = time.monotonic()
        training = asyncio.create_task(self._pipeline.run(self.totals.step + 1))
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
            if parts.beside is not None:
                await parts.beside.close()
            for left in await asyncio.gather(*beside, return_exceptions=True):
                if isinstance(left, Exception):
                    raise left
        if self._stop:
            status: Literal["stopped", "suspended"] = "suspended" if self._stop.suspended else "stopped"
            return Ending(status, f"{self._stop.sentence} at step {self.totals.step}", self._stop.signal)
        return None

    async def _let_update_finish(self, training: asyncio.Task[None]) -> bool:
        """Waits for the next boundary if the learner's weights are between two now; whether they were.

        A signal leaves no time for a long update: then the learner is asked to go back to the last boundary, which it
        can until its first optimizer step. The operator waits for the step that is under way.
        """
        if training.done() or not self.parts.trainer.busy:
            return False
        deadlines = self.parts.job.spec.deadlines
        if self._stop.suspended:
            await asyncio.wait({training}, timeout=float(deadlines.progress_seconds))
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                left = self.parts.trainer.seconds_left
                if left > GRACE_SECONDS and not self._is_saved:
                    self.parts.view.message(f"the update under way would take {left:.0f} s more: it is given up")
                    # Before the pipeline ends, and with it what its groups have so far.
                    if self._begun is None:
                        self._begun = await self._begun_at_the_end()
                    await self.parts.trainer.give_up()
                await asyncio.wait({training})
        return True

    # --- a step's boundary

    async def _after_step(self, record: StepRecord) -> bool:
        parts, spec = self.parts, self.parts.job.spec
        self._count(record)
        pipeline = self._pipeline
        assert pipeline is not None
        metrics = {name: float(value) for name, value in record.metrics.items()} | parts.pipeline_metrics(pipeline)
        try:
            metrics |= parts.limits.look(record.step, metrics, parts.step.most_apart)
        finally:
            self._controls.standing.apart(parts.limits.sentence)
        self._unwritten = (record.step, metrics)
        self._boundary = self._state()
        parts.ledger.write()
        # Without held-out sets the step's own samples say how good the policy is.
        reason = self._end.reason(self._progress(None if parts.validator else metrics.get("reward/mean")))
        if reason is None and await pipeline.read(self._feed.exhausted()) and not pipeline.open_prompts:
            reason = "the data is exhausted"
        await self._write_generations(record, last=reason is not None)
        try:
            if parts.validator is not None:
                reward = await self._validation(record.step, metrics, last=reason is not None)
                reason = reason or self._end.reason(self._progress(reward))
        finally:
            now = time.monotonic()
            seconds, self._step_began = now - self._step_began, now
            metrics |= parts.speed.of(record.groups, metrics, seconds)
        # Before the checkpoint: who is killed in between does the step again; who resumed from it would not write it.
        await self._write()
        if reason is not None or self._stop or self._is_due(spec.checkpoint.every_steps, record.step):
            last = reason is not None
            await self._checkpoint_boundary(last=last, must=last or bool(self._stop))
        self._reason = reason or self._reason
        return reason is None and not self._stop

    def _count(self, record: StepRecord) -> None:
        totals = self.totals
        totals.step, totals.version = record.step, record.version
        totals.groups += len(record.groups)
        totals.samples += sum(len(group.episodes) for group in record.groups)
        totals.tokens += sum(sum(sequence_lengths(group)) for group in record.groups)
        totals.response_tokens += sum(group.response_tokens for group in record.groups)
        now = time.monotonic()
        totals.seconds += now - self._step_began

    async def _write(self) -> None:
        """Hands the step that just ended to sinks and view."""
        if self._unwritten is None:
            return
        (step, metrics), self._unwritten = self._unwritten, None
        totals = self.totals
        progress = {
            "progress/step": totals.step,
            "progress/version": totals.version,
            "progress/epoch": self.parts.epoch(),
            "progress/groups": totals.groups,
            "progress/samples": totals.samples,
            "progress/tokens": totals.tokens,
            "progress/seconds": totals.seconds,
        }
        # A step that is written anew has its own already.
        metrics |= progress | metrics
        self.parts.view.step(ShownStep(step, metrics))
        await asyncio.to_thread(self.parts.sinks.step, step, metrics)

    async def _write_generations(self, record: StepRecord, *, last: bool) -> None:
        """For people: what the first weights make and what the last step's made, whatever came between or not."""
        spec, step = self.parts.job.spec, record.step
        if spec.logging.samples_every == 0:
            return
        if step == 1 and not (self.parts.validator and spec.validation.at_start):
            step = 0  # of weights that no step has changed, as those of a validation at the start
        elif not last and not self._is_due(spec.logging.samples_every, step):
            return
        rows = sample_rows(record.groups, spec.logging.samples_per_write, self.parts.decode)
        await asyncio.to_thread(self.parts.sinks.samples, step, rows)

    def _progress(self, reward: float | None) -> Progress:
        return Progress(self.totals.step, self.totals.samples, self.totals.seconds, reward)

    @staticmethod
    def _is_due(every: int | None, step: int) -> bool:
        return every is not None and every > 0 and step % every == 0

    # --- validation

    async def _validate_at_start(self) -> None:
        if self.parts.validator is None:
            return
        metrics: dict[str, float] = {}
        await self._validate(0, metrics)
        self.parts.view.step(ShownStep(0, metrics))
        await asyncio.to_thread(self.parts.sinks.step, 0, metrics)
        self.parts.times.lap()

    async def _validation(self, step: int, metrics: dict[str, float], *, last: bool) -> float | None:
        """What there is to validate at a boundary, now or beside the steps to come. Returns the mean score that became
        known, if any. The ``last`` weights of a job, and those that may be good enough to stop, are validated now."""
        beside, reward = self.parts.beside, None
        due = last or self._is_due(self.parts.job.spec.validation.every, step)
        if beside is not None and beside.under_way and (due or beside.done):
            reward = await self._take_from_beside(beside, metrics)
            last = last or self._end.reason(self._progress(reward)) is not None
        if last or due:
            # In every checkpoint of this boundary, until the result is in the record.
            self._boundary["unvalidated"] = metrics
        if last or (due and (beside is None or not await beside.begin(step))):
            reward = await self._validate(step, metrics)
            self._boundary["unvalidated"] = None
        return reward

    async def _make_up_validation(self) -> float | None:
        """The validation of the restored step, if a signal kept an earlier process from it; its line is written anew,
        with the result. Returns the mean score."""
        metrics: dict[str, float] | None = self._boundary["unvalidated"]
        if metrics is None or self.parts.validator is None:
            return None
        reward = await self._validate(self.totals.step, metrics)
        self._boundary["unvalidated"] = None
        self._unwritten = self.totals.step, metrics
        await self._write()
        self.parts.times.lap()
        return reward

    async def _take_from_beside(self, beside: ValidationBeside, metrics: dict[str, float]) -> float | None:
        with self.parts.times.stage("validation"), beside.waited_for():
            taken = await beside.take()
        if taken is None:
            return None
        step, result = taken
        metrics |= result.metrics | {VALIDATION_STEP: float(step)}
        await self._write_validation_samples(step, result)
        return result.mean

    async def _validate(self, step: int, metrics: dict[str, float]) -> float:
        metrics.pop(VALIDATION_STEP, None)
        validator = self.parts.validator
        assert validator is not None
        with self.parts.times.stage("validation"):
            result = await validator.run()
        metrics |= result.metrics
        await self._write_validation_samples(step, result)
        return result.mean

    async def _write_validation_samples(self, step: int, result: ValidationResult) -> None:
        limit = self.parts.job.spec.logging.samples_per_write
        rows = [
            row for groups in result.groups.values() for row in sample_rows(groups[:limit], limit, self.parts.decode)
        ]
        await asyncio.to_thread(self.parts.sinks.samples, step, rows)

    # --- state

    def _state(self) -> dict[str, Any]:
        """Everything but the learner's part and the tokens of open groups, as plain data. ``unvalidated``: the step's
        metrics, as long as the validation that is due at this boundary is missing in them."""
        return {
            **asdict(self.totals),
            "run": self._run,
            start_model.STATE: self.parts.model,
            "feed": self._feed.state_dict(),
            "open": [[p.ordinal, p.epoch, p.source, p.row, deadline] for p, deadline in self._open()],
            "groups_per_version": self._schedule_settings().groups_per_version,
            "training": self.parts.step.state_dict(),
            weights.STATE: weights.state_of(self.parts.engines.pool.published, self.parts.dtype),
            "unvalidated": None,
        }

    def _schedule(self) -> Schedule:
        """The schedule, with the groups that an earlier process left open under its own size of a version."""
        settings = self.parts.schedule
        if not self._restored:
            return Schedule(settings, self.totals.version)
        # Another size of a pull cannot be brought about step by step; the bound then holds for what comes.
        size = settings.groups_per_version if self._restored_size % settings.groups_per_pull else self._restored_size
        schedule = Schedule(replace(settings, groups_per_version=size), self.totals.version)
        for prompt, deadline in self._restored:
            schedule.restored(prompt.ordinal, deadline)
        if size != settings.groups_per_version:
            schedule.change(settings)
        return schedule

    def _schedule_settings(self) -> ScheduleSettings:
        return self.parts.schedule if self._pipeline is None else self._pipeline.schedule.settings

    def _open(self) -> list[tuple[Prompt, int]]:
        """Prompts that were handed out and are neither trained nor dropped, with their deadlines."""
        pipeline = self._pipeline
        if pipeline is None:
            return self._restored
        return [(prompt, pipeline.schedule.deadline(prompt.ordinal)) for prompt in pipeline.open_prompts]

    async def _begun_at_the_end(self) -> dict[int, dict[EpisodeId, BegunTurn]]:
        """The same, from engines that may not answer: what cannot be had soon is made again."""
        try:
            async with asyncio.timeout(_COLLECT_SECONDS):
                return await self._begun_groups()
        except (TimeoutError, EngineError, DeadlineError) as error:
            self.parts.view.message(f"tokens of running samples are lost ({error or 'no answer'}): they are made again")
            return {}

    async def _begun_groups(self) -> dict[int, dict[EpisodeId, BegunTurn]]:
        """The tokens of all open groups, finished or not."""
        begun = await self.parts.rollout.begun()
        for group in [] if self._pipeline is None else self._pipeline.finished_groups:
            begun[group.prompt.ordinal] = self.parts.rollout.kept(group.episodes)
        return begun

    async def _announce(self, version: int) -> None:
        """Before a publication: this attempt is still the newest, and the number is used from now on."""
        ledger, patience = self.parts.ledger, self.parts.ledger.patience_seconds
        with self.parts.waits.wait("trainer", "the number of a version to be written down", patience):
            await self.parts.fence.announce_patiently(version, patience)
        with self.parts.waits.wait("trainer", f"{ledger.path} to take the number of a version", patience):
            await ledger.announce(version, self.totals.step)

    async def _restore(self, checkpoint: Checkpoint, *, own: bool) -> None:
        """Goes on from ``checkpoint``: with its weights and optimizer, its place in the data, its open groups and its
        counts. Of another run's (not ``own``) stay behind its name, a validation that it still owed, and what it had
        changed by other settings than this job's."""
        files = await asyncio.to_thread(checkpoint.files)
        state = await asyncio.to_thread(driver_state, files)
        try:
            self.totals = Totals.of(state)
            self._run = str(state["run"]) if own else self._run
            belongs_to = _owner(state)
            await aside(lambda: self.parts.feed.load_state_dict(state["feed"]))
            self.parts.step.load_state_dict(state["training"], own=own)
            opened, size, kept = state["open"], int(state["groups_per_version"]), state[weights.STATE]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint {checkpoint.place} was written by another version: {error!r}") from error
        self._feed = RunFeed(self.parts.feed)
        self.parts.limits.resumed(correcting=self.parts.step.correcting)
        # Versions that were published after the checkpoint are gone, and their numbers with them.
        used = await self.parts.ledger.roll_back(
            files / ledger.FILE,
            step=self.totals.step,
            next_ordinal=int(state["feed"]["ordinal"]),
            again=[ordinal for ordinal, *_ in opened],
        )
        if self.parts.ledger.fresh:  # the one of the last attempt was lost with its node
            used = max(used, self.parts.fence.versions)
        self._check_ledger(files, checkpoint)
        before = self.totals.version
        if used > before:
            self.totals.version = used + 1
        later = self.totals.version - before
        feed = self.parts.feed
        self._restored = await aside(
            lambda: [
                (feed.prompt_at(ordinal=ordinal, epoch=epoch, source=source, row=row), deadline + later)
                for ordinal, epoch, source, row, deadline in opened
            ]
        )
        self.parts.rollout.restored = await asyncio.to_thread(
            unfinished.read,
            files,
            versions_later=later,
            keep=self.parts.shelf.put,
            report=self.parts.view.message,
        )
        self._restored_size = size
        unvalidated = state.get("unvalidated") if own else None
        self._boundary = self._state() | {weights.STATE: kept, "unvalidated": unvalidated}
        self.checkpoint = checkpoint
        self._controls.standing.checkpointed(checkpoint, self.totals.version)
        if self.parts.engines.turns is not None:
            await self.parts.engines.turns.to_learner()
        await self.parts.trainer.restore(lambda: self._read_learner(checkpoint, belongs_to), self.totals.version)
        weights.check(state, self.parts.engines.pool.published, self.parts.dtype, checkpoint.place)

    async def _read_learner(self, checkpoint: Checkpoint, belongs_to: str) -> None:
        seconds = float(self.parts.job.spec.deadlines.progress_seconds)
        with self.parts.waits.wait("driver", f"the learner to read {checkpoint.place}", seconds):
            await self.parts.learner.load(checkpoint.learner, belongs_to)

    def _check_ledger(self, files: Path, checkpoint: Checkpoint) -> None:
        """Raises ``CheckpointError`` when the ledger knows of other trained groups than the driver's part."""
        trained = self.parts.ledger.account.trained.groups
        if (files / ledger.FILE).exists() and trained != self.totals.groups:
            raise CheckpointError(
                f"the ledger in checkpoint {checkpoint.place} has {trained} trained groups, but {self.totals.groups} "
                f"groups were trained until its step {self.totals.step}: it is that of another step or run. Use a "
                "checkpoint as it was written"
            )

    @property
    def _saved_step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def _last_saved(self) -> str:
        saved = self._saved_step
        return f"the last checkpoint is that of step {saved}" if saved else "there is no checkpoint"

    @property
    def _is_saved(self) -> bool:
        """Whether nothing would be lost of the last boundary."""
        return self.parts.checkpoints is None or int(self._boundary["step"]) == self._saved_step

    async def _checkpoint_boundary(self, *, last: bool, must: bool) -> None:
        """Saves the last boundary, unless it is saved already or an unfinished update has gone beyond it.

        Weights that may have to be given up are saved only as the ``last`` of the job. Raises ``CheckpointError`` and
        ``OutputError`` when it cannot be written and ``must`` be; otherwise the run says so and goes on: a disk that
        is full now may have room for the next one. For a store that does not answer the last one waits.
        """
        if self.parts.checkpoints is None:
            return
        step = int(self._boundary["step"])
        if step == self._saved_step:
            return
        if self.parts.limits.suspect and not last:
            self.parts.view.message(f"no checkpoint of step {step}: {self.parts.limits.sentence}; {self._last_saved}")
            return
        if self.parts.trainer.busy:
            self.parts.view.message(
                f"step {step + 1} was interrupted when its update had changed the weights and was not done, so step "
                f"{step} cannot be saved any more: {self._last_saved} (checkpoint.everySteps)"
            )
            return
        seconds = float(self.parts.job.spec.deadlines.progress_seconds)
        save_learner = functools.partial(self.parts.learner.save, belongs_to=_owner(self._boundary))
        place = self.parts.checkpoints.place
        waiting = self.parts.waits.wait("trainer", f"the checkpoint of step {step} to be written into {place}", seconds)
        with self.parts.times.stage("checkpoint"), waiting:
            try:
                async with asyncio.timeout(seconds):
                    write = functools.partial(
                        self.parts.checkpoints.write,
                        step,
                        self._boundary,
                        save_learner,
                        self._save_groups,
                        self.parts.fence.check,
                    )
                    self.checkpoint = await (self._written_patiently(write) if last and must else write())
            except TimeoutError:
                raise DeadlineError(
                    f"the checkpoint of step {step} was not written into {place} within {seconds:.0f} s "
                    "(deadlines.progressSeconds). If the storage is slow, raise it; if it hangs, mend it or choose "
                    "another one, and start again: the checkpoints before are whole."
                ) from None
            except (CheckpointError, OutputError) as error:
                if must:
                    raise
                self.parts.view.message(f"{error} Training goes on; {self._last_saved}.")
                self._controls.standing.not_saved(str(error))
                return
        self._controls.standing.checkpointed(self.checkpoint, int(self._boundary["version"]))

    async def _written_patiently(self, write: Callable[[], Awaitable[Checkpoint]]) -> Checkpoint:
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
                    self.parts.view.message(f"{error}: the run waits for it, to save its end; {self._last_saved}")
                told = True
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _save_groups(self, folder: Path) -> None:
        """The checkpoint's part of open groups and of the ledger."""
        begun = self._begun if self._begun is not None else await self._begun_groups()
        opened = {ordinal for ordinal, *_ in self._boundary["open"]}
        kept = {ordinal: group for ordinal, group in begun.items() if ordinal in opened}
        await asyncio.to_thread(unfinished.write, kept, folder, self.parts.shelf.rest)
        await self.parts.ledger.snapshot(folder / ledger.FILE)
