"""One job from its file to its report: `rljob run`.

    lock the output folder -> read inputs -> start Ray and the parts -> train -> summary, report, timeline

Whatever happens, the folder says afterwards how the run ended, and no process is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rljob_trainer.checkpoint import CheckpointStore
from rljob_trainer.driver.assemble import Inputs, assemble, read_inputs
from rljob_trainer.driver.ending import Ending
from rljob_trainer.driver.engines import engine_count, inside_ranks
from rljob_trainer.driver.local_ray import ray_for_run
from rljob_trainer.driver.output import OutputFolder
from rljob_trainer.driver.resuming import Start, where_to_start
from rljob_trainer.driver.session import Session
from rljob_trainer.driver.signals import StopRequest, listening
from rljob_trainer.errors import RLJobError
from rljob_trainer.telemetry import run_folder
from rljob_trainer.telemetry.report import write_report
from rljob_trainer.telemetry.sinks import Sinks, open_sinks
from rljob_trainer.telemetry.summary import Outcome, Summary, ValidationHistory, describe_machine, package_versions
from rljob_trainer.telemetry.timing import StageTimes
from rljob_trainer.telemetry.trackers import open_trackers
from rljob_trainer.telemetry.view import JobSummary, View

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedJob

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """``base`` is where the job file's relative paths start; ``resume`` is auto, never or a checkpoint's path."""

    output: Path
    base: Path
    resume: str = "auto"


async def run_job(job: ResolvedJob, options: RunOptions, view: View) -> Ending:
    """Trains until the job is done or a signal asks to stop. Raises ``RLJobError`` with a message for the user."""
    with OutputFolder(options.output) as output, listening() as stop:
        store = CheckpointStore(output.checkpoints, job.spec.checkpoint.keep)
        start = where_to_start(options.resume, output, store, view.message)
        record = _Record(job, output, start)
        try:
            training = asyncio.create_task(_train(job, options, output, store, start, view, stop, record))
            ending = await _unless_stopped_early(training, stop, record)
        except BaseException as error:
            record.write("failed", _described(error))
            raise
        record.write("succeeded" if ending.status == "succeeded" else "interrupted", ending.reason)
        view.message(f"{ending.status}: {ending.reason}; report: {output.path / run_folder.REPORT}")
        return ending


async def _unless_stopped_early(training: asyncio.Task[Ending], stop: StopRequest, record: _Record) -> Ending:
    """The training's ending. Before its first step a request to stop just ends it; later the session sees to that."""
    asked = asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait({training, asked}, return_when=asyncio.FIRST_COMPLETED)
        if training.done() or record.session is not None:
            return await training
        training.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await training
        number = stop.signal
        return Ending("stopped", f"{number.name if number else 'a request'} before the first step", number)
    finally:
        asked.cancel()
        training.cancel()


async def _train(
    job: ResolvedJob,
    options: RunOptions,
    output: OutputFolder,
    store: CheckpointStore,
    start: Start,
    view: View,
    stop: StopRequest,
    record: _Record,
) -> Ending:
    spec = job.spec
    with run_folder.writing(output.path):
        (output.path / run_folder.JOB).write_text(yaml.safe_dump(job.document(), sort_keys=False, allow_unicode=True))
    inputs = read_inputs(job, options.base, output.model)
    output.point_to_model(inputs.model.path)
    record.model = f"{inputs.model.family}, {inputs.model.parameters / 1e6:.3g} M parameters"
    engines = 0 if inside_ranks(spec) else engine_count(spec)
    times = StageTimes()
    record.times = times
    async with AsyncExitStack() as stack:
        view.start(_summary_of(job, inputs, output, start))
        sinks = _open_sinks(job, output, start, view)
        stack.callback(sinks.close)
        stack.enter_context(ray_for_run(spec.trainer.ranks + engines))
        stop.listen()
        parts = await assemble(
            job, inputs, base=options.base, checkpoints=store, sinks=sinks, view=view, times=times, stack=stack
        )
        session = Session(parts, stop)
        record.session = session
        return await session.run(start.checkpoint)


class _Record:
    """What is known about the run, for the files it leaves: also when it fails half-way."""

    def __init__(self, job: ResolvedJob, output: OutputFolder, start: Start) -> None:
        self.model = ""
        self.session: Session | None = None
        self.times: StageTimes | None = None
        self._job = job
        self._output = output
        self._start = start
        self._began = datetime.datetime.now(datetime.UTC)

    def write(self, outcome: Outcome, reason: str) -> None:
        """Summary, timeline and report. A folder that cannot be written is logged: the run's own error matters more."""
        try:
            self._write(outcome, reason)
        except RLJobError as error:
            _log.error("%s", error)

    def _write(self, outcome: Outcome, reason: str) -> None:
        folder, session = self._output.path, self.session
        ended = datetime.datetime.now(datetime.UTC)
        totals = None if session is None else session.totals
        checkpoint = self._start.checkpoint if session is None else session.checkpoint or self._start.checkpoint
        Summary(
            outcome=outcome,
            reason=reason,
            job=self._job.metadata.name,
            algorithm=self._job.spec.algorithm.preset,
            model=self.model,
            started_at=self._began,
            ended_at=ended,
            seconds=(ended - self._began).total_seconds(),
            resumed_from_step=None if self._start.checkpoint is None else self._start.checkpoint.step,
            steps=0 if totals is None else totals.step,
            total_steps=self._job.spec.stop.steps,
            version=0 if totals is None else totals.version,
            samples=0 if totals is None else totals.samples,
            prompt_tokens=0 if totals is None else totals.tokens - totals.response_tokens,
            response_tokens=0 if totals is None else totals.response_tokens,
            seconds_by_stage={} if self.times is None else self.times.exclusive_totals,
            validation=ValidationHistory.read(folder).by_source(),
            checkpoint=None if checkpoint is None else str(checkpoint.path),
            report=str(folder / run_folder.REPORT),
            packages=package_versions(),
            machine=describe_machine(),
        ).write(folder)
        if self.times is not None:
            self.times.trace.write(folder / run_folder.TIMELINE)
        write_report(folder)


def _open_sinks(job: ResolvedJob, output: OutputFolder, start: Start, view: View) -> Sinks:
    restored = start.checkpoint.step if start.own and start.checkpoint is not None else None
    trackers = open_trackers(
        job.spec.logging,
        output.path,
        name=job.metadata.name,
        config=job.document(),
        resume=restored is not None,
        warn=view.message,
    )
    return open_sinks(output.path, tensorboard=job.spec.logging.tensorboard, restored_step=restored, trackers=trackers)


def _summary_of(job: ResolvedJob, inputs: Inputs, output: OutputFolder, start: Start) -> JobSummary:
    spec = job.spec
    resumed = None if start.checkpoint is None else start.checkpoint.step
    return JobSummary(
        name=job.metadata.name,
        algorithm=spec.algorithm.preset,
        model=f"{inputs.model.family}, {inputs.model.parameters / 1e6:.3g} M parameters",
        mode=f"{spec.pipeline.mode}, {spec.placement}, {spec.rollout.engine} engine",
        output=str(output.path),
        total_steps=spec.stop.steps,
        first_step=(resumed or 0) + 1,
        note="" if resumed is None else f"from step {resumed}",
    )


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, RLJobError) else f"{type(error).__name__}: {error}"
