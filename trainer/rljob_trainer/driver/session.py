"""The life of a run between its first and its last step: what happens at each step's boundary, and how it stops.

At a boundary nothing of the step is pending: its batch is trained, its weights are published. That is where metrics are
written, validation runs, checkpoints are made and the stop conditions are looked at. A request to stop (a signal)
lets an update that is under way finish, drops what is being generated, and leaves a checkpoint of the last boundary.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from rljob_trainer.checkpoint import Checkpoint
from rljob_trainer.driver.ending import Ending
from rljob_trainer.driver.feeding import RunFeed
from rljob_trainer.driver.parts import Parts
from rljob_trainer.driver.signals import StopRequest
from rljob_trainer.driver.stopping import Progress, reason_to_stop
from rljob_trainer.driver.validating import ValidationResult, sample_rows
from rljob_trainer.errors import CheckpointError
from rljob_trainer.pipeline.loop import Pipeline
from rljob_trainer.pipeline.parts import StepRecord
from rljob_trainer.pipeline.schedule import Schedule
from rljob_trainer.samples import Group, Prompt
from rljob_trainer.telemetry.speed import throughput_metrics, timing_metrics
from rljob_trainer.telemetry.view import StepRecord as ShownStep

GRACE_SECONDS = 6.0
"""How long an update that is under way may take after a request to stop; the rest of ten seconds is for saving."""


@dataclass(slots=True)
class Totals:
    """What has been done since the run began, over all restarts."""

    step: int = 0
    version: int = 0
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    response_tokens: int = 0
    dropped_groups: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Totals:
        return cls(**{field.name: state[field.name] for field in fields(cls)})


class Session:
    """Trains until the job is done or somebody asks to stop. Use ``run`` once."""

    def __init__(self, parts: Parts, stop: StopRequest) -> None:
        self.parts = parts
        self.totals = Totals()
        self.checkpoint: Checkpoint | None = None
        self._stop = stop
        self._reason = "the data is exhausted"
        self._feed = RunFeed(parts.feed)
        self._boundary: dict[str, Any] = {}
        self._unwritten: tuple[int, dict[str, float]] | None = None
        self._pipeline: Pipeline | None = None
        self._step_began = time.monotonic()

    # --- the whole

    async def run(self, restored: Checkpoint | None) -> Ending:
        """Raises whatever a part raises; checkpoints that exist stay."""
        if restored is not None:
            await self._restore(restored)
        else:
            self._boundary = self._state([])
        if self.totals.step == 0 and self.parts.job.spec.validation.at_start:
            await self._validate_at_start()
        stopped = await self._train()
        self._write()
        await self._checkpoint_boundary()
        return stopped or Ending("succeeded", self._reason)

    async def _train(self) -> Ending | None:
        """Runs the pipeline to its end, or until a request to stop, of which the ending then tells."""
        parts, spec = self.parts, self.parts.job.spec
        if reason := reason_to_stop(spec.stop, self._progress(None)):
            self._reason = reason
            return None
        self._pipeline = Pipeline(
            self._feed,
            parts.rollout,
            parts.trainer,
            Schedule(parts.schedule, self.totals.version),
            after_step=self._after_step,
            keep=parts.keep,
            most_dropped=parts.most_dropped,
            stage=parts.times.stage,
            sample_deadline_seconds=spec.deadlines.progress_seconds,
        )
        self._step_began = time.monotonic()
        training = asyncio.create_task(self._pipeline.run(self.totals.step + 1))
        asked = asyncio.create_task(self._stop.asked.wait())
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({training, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not training.done() and parts.trainer.busy:
                await asyncio.wait({training}, timeout=GRACE_SECONDS)
            if not training.done():
                training.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await training
        finally:
            for task in (training, asked, watching):
                task.cancel()
        if self._stop:
            number = self._stop.signal
            return Ending("stopped", f"{number.name if number else 'a request'} at step {self.totals.step}", number)
        return None

    async def _watch(self) -> None:
        """Shows what the trainer waits for."""
        while True:
            self.parts.view.waiting(self._pipeline.waiting if self._pipeline else None)
            await asyncio.sleep(0.5)

    # --- a step's boundary

    async def _after_step(self, record: StepRecord) -> bool:
        parts, spec = self.parts, self.parts.job.spec
        self._count(record)
        pipeline = self._pipeline
        assert pipeline is not None
        metrics = dict(record.metrics) | parts.pipeline_metrics(pipeline)
        self._unwritten = (record.step, metrics)
        self._boundary = self._state(pipeline.open_prompts)
        if self._is_due(spec.logging.samples_every, record.step):
            parts.sinks.samples(record.step, sample_rows(record.groups, spec.logging.samples_per_write))
        reason = reason_to_stop(spec.stop, self._progress(None))
        if reason is None and self._feed.exhausted and not pipeline.open_prompts:
            reason = "the data is exhausted"
        reward = metrics.get("reward/mean")
        if parts.validator is not None:
            due = reason is not None or self._is_due(spec.validation.every, record.step)
            reward = await self._validate(record.step, metrics) if due else None
        reason = reason or reason_to_stop(spec.stop, self._progress(reward))
        if reason is not None or self._is_due(spec.checkpoint.every_steps, record.step):
            await self._checkpoint_boundary()
        metrics |= self._speed(record)
        self._write()
        self._reason = reason or self._reason
        return reason is None and not self._stop

    def _count(self, record: StepRecord) -> None:
        totals = self.totals
        totals.step, totals.version = record.step, record.version
        totals.groups += len(record.groups)
        totals.samples += sum(len(group.samples) for group in record.groups)
        totals.tokens += sum(_tokens(group) for group in record.groups)
        totals.response_tokens += sum(len(s.token_ids) for group in record.groups for s in group.samples)
        now = time.monotonic()
        totals.seconds += now - self._step_began

    def _speed(self, record: StepRecord) -> dict[str, float]:
        """Times and rates of the step that ends here; the next begins."""
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        response = sum(len(s.token_ids) for group in record.groups for s in group.samples)
        tokens = sum(_tokens(group) for group in record.groups)
        lap = self.parts.times.lap() | {"step": seconds}
        trained_seconds = max(1e-9, seconds - lap.get("validation", 0.0) - lap.get("checkpoint", 0.0))
        return timing_metrics(lap, all_tokens=tokens, response_tokens=response) | throughput_metrics(
            step_seconds=trained_seconds,
            prompt_tokens=tokens - response,
            response_tokens=response,
            samples=sum(len(group.samples) for group in record.groups),
            devices=self.parts.devices,
        )

    def _write(self) -> None:
        """Hands the step that just ended to sinks and view."""
        if self._unwritten is None:
            return
        (step, metrics), self._unwritten = self._unwritten, None
        totals = self.totals
        metrics |= {
            "progress/step": totals.step,
            "progress/version": totals.version,
            "progress/epoch": self.parts.epoch(),
            "progress/groups": totals.groups,
            "progress/samples": totals.samples,
            "progress/tokens": totals.tokens,
            "progress/seconds": totals.seconds,
        }
        self.parts.sinks.step(step, metrics)
        self.parts.view.step(ShownStep(step, metrics, self.parts.times.shares()))

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
        self.parts.sinks.step(0, metrics)
        self.parts.view.step(ShownStep(0, metrics))
        self.parts.times.lap()

    async def _validate(self, step: int, metrics: dict[str, float]) -> float:
        validator = self.parts.validator
        assert validator is not None
        with self.parts.times.stage("validation"):
            result = await validator.run()
        metrics |= result.metrics
        self._write_validation_samples(step, result)
        return result.mean

    def _write_validation_samples(self, step: int, result: ValidationResult) -> None:
        limit = self.parts.job.spec.logging.samples_per_write
        rows = [row for groups in result.groups.values() for row in sample_rows(groups[:limit], limit)]
        self.parts.sinks.samples(step, rows)

    # --- state

    def _state(self, open_prompts: list[Prompt]) -> dict[str, Any]:
        """Everything but the learner's part, as plain data."""
        return {
            **asdict(self.totals),
            "feed": self._feed.state_dict(),
            "again": [[p.ordinal, p.epoch, p.source, p.row] for p in [*open_prompts, *self._feed.pending]],
            "training": self.parts.step.state_dict(),
        }

    async def _restore(self, checkpoint: Checkpoint) -> None:
        state: dict[str, Any] = checkpoint.driver_state()
        try:
            self.totals = Totals.of(state)
            self.parts.feed.load_state_dict(state["feed"])
            self.parts.step.load_state_dict(state["training"])
            again = state["again"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint {checkpoint.path} was written by another version: {error!r}") from error
        self._feed = RunFeed(
            self.parts.feed,
            [
                self.parts.feed.prompt_at(ordinal=ordinal, epoch=epoch, source=source, row=row)
                for ordinal, epoch, source, row in again
            ],
        )
        self._boundary = state
        self.checkpoint = checkpoint
        await self.parts.learner.load(checkpoint.learner)
        await self.parts.trainer.publish(self.totals.version)

    async def _checkpoint_boundary(self) -> None:
        """Saves the last boundary, unless it is saved already or an unfinished update has gone beyond it."""
        step = int(self._boundary["step"])
        saved = 0 if self.checkpoint is None else self.checkpoint.step
        if step == saved:
            return
        if self.parts.trainer.busy:
            self.parts.view.message(
                f"step {step + 1} was interrupted in its update: the last checkpoint is that of step {saved}"
            )
            return
        with self.parts.times.stage("checkpoint"):
            self.checkpoint = await self.parts.checkpoints.write(step, self._boundary, self.parts.learner.save)


def _tokens(group: Group) -> int:
    """Prompt and response tokens of all samples."""
    return sum(len(group.prompt.token_ids) + len(s.token_ids) for s in group.samples)
