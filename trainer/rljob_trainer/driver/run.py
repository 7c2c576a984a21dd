"""One job from its file to its report: `rljob run`.

    lock the output folder -> read inputs -> start Ray and the parts -> train -> summary, report, timeline

Whatever happens, the folder says afterwards how the run ended, and no process is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rljob_api import cluster
from rljob_api.status import STATUS_PATH, EndKind
from rljob_trainer.aside import Threads
from rljob_trainer.control.controls import Controls
from rljob_trainer.control.http import Answers, Listening, serving
from rljob_trainer.control.mismatch_limits import RollBackError, start_again
from rljob_trainer.control.signals import StopRequest
from rljob_trainer.control.signals import listening as listening_to_signals
from rljob_trainer.control.standing import RunStanding
from rljob_trainer.control.steering import Steering
from rljob_trainer.control.stop_conditions import RunEnd
from rljob_trainer.driver.assemble import Inputs, assemble, read_inputs
from rljob_trainer.driver.closing import closing, closing_ledger
from rljob_trainer.driver.ending import Ending
from rljob_trainer.driver.engines import inside_ranks
from rljob_trainer.driver.feeding import date_of_prompts
from rljob_trainer.driver.gpus import check_gpus_of_machine
from rljob_trainer.driver.judges import judge_count
from rljob_trainer.driver.ray_beside import ray_beside
from rljob_trainer.driver.run_files import RunFiles
from rljob_trainer.driver.scorers import scorer_count
from rljob_trainer.driver.session import Session
from rljob_trainer.errors import CheckpointError, DeadlineError, OutputError, RLJobError, exit_code_of
from rljob_trainer.garbage import seldom, settle
from rljob_trainer.models.sharing import is_below, on_shared_storage, send_model
from rljob_trainer.pools.size import engine_count
from rljob_trainer.record import start_model
from rljob_trainer.record.fence import Fence, FencedError, RemovedError
from rljob_trainer.record.ledger import FILE as LEDGER
from rljob_trainer.record.ledger import Ledger
from rljob_trainer.record.output import OutputFolder
from rljob_trainer.record.place import State, kept_up_to_date, state_of
from rljob_trainer.record.resuming import Start, where_to_start
from rljob_trainer.record.same_job import check_unchanged
from rljob_trainer.record.written_job import write_job
from rljob_trainer.rollout.shelf import Shelf
from rljob_trainer.telemetry import run_folder
from rljob_trainer.telemetry.sinks import Sinks, open_sinks
from rljob_trainer.telemetry.summary import Outcome
from rljob_trainer.telemetry.timing import StageTimes
from rljob_trainer.telemetry.trackers import open_trackers
from rljob_trainer.telemetry.view import JobSummary, View, Views
from rljob_trainer.texts import writable
from rljob_trainer.waits import Waits

if TYPE_CHECKING:
    from rljob_api.resolved import ResolvedJob, ResolvedSpec
    from rljob_trainer.models.folder import ModelFolder

_log = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_STATUS_SECONDS = 5.0
_KEEP_SECONDS = 120.0
"""For the last of the run's files, which is what has changed since they were sent a minute before or less."""
_STOPPED_KEEP_SECONDS = 5.0
"""The same for a run that was asked to stop, whose files went out with its checkpoint."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """``base`` is where the job file's relative paths start; ``resume`` is auto, never or a checkpoint's place."""

    output: Path
    base: Path
    resume: str = "auto"
    restore: str | None = None
    """The place of a checkpoint for a run that has none of its own yet."""
    state: str | None = None
    """Address in a bucket where the state is kept; None: in the output folder."""
    steps: int | None = None
    """Steps after which the run ends, if the job goes on for longer."""
    listening: Listening | None = None
    """Where to serve status and commands; None: nowhere."""
    attempt: int | None = None
    """Number of this attempt; None: the one after the last."""
    generation: int = 0
    by_role: bool = False
    """Whether ranks and engines are on other nodes, which say in a label what they are for."""
    storage: Path | None = None
    """Where the storage is mounted that all nodes share; None: everything is on one machine."""
    keeps_state: bool = True
    """Whether the state outlives the nodes, and can be reached from all of them; else there are no checkpoints."""

    def onwards(self, *, saved: bool) -> str:
        """How the run goes on after a signal has ended it; empty: it cannot. ``saved``: it has left a checkpoint."""
        if not self.keeps_state:
            return ""
        if self.storage is not None:
            return f"the next attempt {'continues the run' if saved else 'starts over'}"
        if not saved:
            return "nothing was saved yet: the same command starts over"
        without = "" if self.resume == "auto" else " without --resume"
        return f"the same command{without} continues the run"

    def to_export(self, place: str) -> str:
        """The command that exports what a finished run has trained; empty: its place is of the cluster's alone."""
        if not self.keeps_state or self.storage is not None:
            return ""
        return f"export the model: rljob export {shlex.quote(place)} --to DIR"

    def shown(self, place: str) -> str:
        """A place as the job file would name it, where that means more to a user than a path in a pod."""
        return place if self.storage is None else cluster.location(place, str(self.storage))


async def run_job(job: ResolvedJob, options: RunOptions, view: View) -> Ending:
    """Trains until the job is done or a signal asks to stop. Raises ``RLJobError`` with a message for the user."""
    asyncio.get_running_loop().set_default_executor(Threads())
    output = OutputFolder(options.output)
    await asyncio.to_thread(output.__enter__)
    with contextlib.closing(output), listening_to_signals() as stop:
        state = state_of(output, options.state, job.spec.checkpoint.keep)
        fence, start = await asyncio.to_thread(_take_over, job, options, output, state, view)
        controls = _controls_of(job, options, fence.attempt, output.path, stop, view)
        record = RunFiles(job, output, state, start, controls, options.shown)
        async with AsyncExitStack() as stack:
            if options.listening is not None:
                port = await stack.enter_async_context(serving(options.listening, _answers_of(controls)))
                view.message(f"status: http://{options.listening.host}:{port}{STATUS_PATH}")
            watching = asyncio.create_task(_watch(controls, fence))
            stack.callback(watching.cancel)
            await stack.enter_async_context(kept_up_to_date(state, fence.check))
            try:
                held = _Held(job, options, output, state, fence, controls, record)
                training = asyncio.create_task(_train_within_limits(held, start))
                ending = await _unless_stopped_early(training, watching, stop, record)
            except BaseException as error:
                if fence.lost:
                    raise
                controls.standing.ended("failed", _described(error), exit_code_of(error))
                await asyncio.to_thread(record.write, "failed", _described(error))
                await _keep_quietly(state)
                raise
            kind: EndKind = "failed" if ending.status == "stopped" else ending.status
            onwards = options.onwards(saved=record.saved) if ending.status == "stopped" else ""
            next_command = options.to_export(state.place) if ending.status == "succeeded" else onwards
            controls.standing.ended(kind, ending.reason, ending.exit_code, told=ending.told, onwards=onwards)
            outcome: Outcome = "succeeded" if ending.status == "succeeded" else "interrupted"
            await asyncio.to_thread(record.write, outcome, ending.reason)
            report = f"report: {options.shown(f'{state.place}/{run_folder.REPORT}')}"
            view.message("; ".join(filter(None, (f"{ending.told}: {ending.reason}", report, next_command))))
            # With that last line of the log.
            await _keep_quietly(state, _KEEP_SECONDS if outcome == "succeeded" else _STOPPED_KEEP_SECONDS)
        return ending


def _take_over(
    job: ResolvedJob, options: RunOptions, output: OutputFolder, state: State, view: View
) -> tuple[Fence, Start]:
    """Becomes the newest attempt and puts the output folder in order. Raises what the two of them raise."""
    state.bring()
    fence = Fence.take(state.attempt, options.attempt)

    def check_job() -> None:
        if options.storage is None:  # on a cluster the API server has refused the change
            check_unchanged(output.path / run_folder.JOB, job, options.base, view.message)

    start = where_to_start(options.resume, options.restore, output, state, view.message, check_job)
    state.began()
    return fence, start


async def _keep_quietly(state: State, seconds: float = _KEEP_SECONDS) -> None:
    """At the run's end, which matters more than a store that cannot be reached now."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.to_thread(state.keep)
    except TimeoutError:
        _log.error(
            "%s did not accept the run's last files within %.0f s; they are in the output folder", state.place, seconds
        )
    except CheckpointError as error:
        _log.error("%s", error)


def _controls_of(
    job: ResolvedJob, options: RunOptions, attempt: int, folder: Path, stop: StopRequest, view: View
) -> Controls:
    times, waits = StageTimes(), Waits()
    steering = Steering(job.spec, stop, attempt=attempt, generation=options.generation)
    end = RunEnd(job.spec.stop, options.steps)
    standing = RunStanding(job, end, folder, steering, times, waits, shown=options.shown)
    return Controls(Views([view, standing]), standing, steering, stop, end, times, waits)


def _answers_of(controls: Controls) -> Answers:
    return Answers(controls.standing.status, controls.standing.metrics, controls.steering.take)


async def _watch(controls: Controls, fence: Fence) -> None:
    """Shows what goes on, and keeps ``status.json`` fresh for `rljob status DIR`. Raises ``FencedError`` and
    ``RemovedError``."""
    written = -_STATUS_SECONDS
    while True:
        controls.view.show(controls.standing.present())
        if time.monotonic() - written >= _STATUS_SECONDS:
            written = time.monotonic()
            try:
                await asyncio.to_thread(fence.check)
                await controls.standing.write_aside()
            except RemovedError:
                raise
            except (CheckpointError, OutputError) as error:
                _log.warning("%s", error)
        await asyncio.sleep(_WATCH_SECONDS)


async def _unless_stopped_early(
    training: asyncio.Task[Ending], watching: asyncio.Task[None], stop: StopRequest, record: RunFiles
) -> Ending:
    """The training's ending. Until training begins (while parts start, a checkpoint is read, the model is validated) a
    request to stop just ends it; later the session sees to that.

    Raises what the training raises, and ``FencedError`` and ``RemovedError`` as soon as it is known.
    """
    asked = asyncio.create_task(stop.asked.wait())
    awaited: set[asyncio.Task[Any]] = {training, watching, asked}
    try:
        while True:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if training.done():
                return await training
            if watching in awaited and watching.done():
                awaited.discard(watching)
                if isinstance(error := watching.exception(), FencedError | RemovedError):
                    await _cancelled(training)
                    raise error
                _log.error("the status display has stopped: %r", error)
                continue
            if not record.trains:
                await _cancelled(training)
                status: Literal["stopped", "suspended"] = "suspended" if stop.suspended else "stopped"
                return Ending(status, f"{stop.sentence} before the first step", stop.signal)
            awaited.discard(asked)
    finally:
        asked.cancel()
        training.cancel()


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@dataclass(frozen=True, slots=True)
class _Held:
    """What a run holds from the lock on its folder to its end, whatever it trains from."""

    job: ResolvedJob
    options: RunOptions
    output: OutputFolder
    state: State
    fence: Fence
    controls: Controls
    record: RunFiles


async def _train_within_limits(held: _Held, start: Start) -> Ending:
    """Trains; goes back to the last good checkpoint when the limits of the mismatch say so, with all parts new."""
    given, controls = held.job.spec.algorithm.rollout_correction.limits, held.controls
    times = 0
    while True:
        try:
            return await _train(held, start, roll_backs=times)
        except RollBackError as beyond:
            assert given is not None
            times += 1
            start = await asyncio.to_thread(
                start_again, beyond, times, given.roll_backs, held.state.checkpoints, controls.view.message
            )
        now = time.time()
        controls.times.trace.span("limits", f"rolled back to step {held.record.begins_again(start)}", now, now)
        controls.times.lap()
        controls.standing.taken_down()
        controls.steering.taken_down()


async def _train(held: _Held, start: Start, *, roll_backs: int) -> Ending:
    times = held.controls.times
    async with AsyncExitStack() as stack:
        with times.stage("start"):
            session = await _made_ready(held, start, stack, roll_backs)
        times.lap()  # no part of the first step
        seldom()
        settle()
        return await session.run(start.checkpoint, own=start.own)


async def _made_ready(held: _Held, start: Start, stack: AsyncExitStack, roll_backs: int) -> Session:
    """Data, model, Ray, ranks and engines; what is to be ended or closed goes onto ``stack``."""
    job, options, output, controls = held.job, held.options, held.output, held.controls
    spec = job.spec
    # In threads: signals and questions are answered while a large data set is read or a disk hangs.
    await asyncio.to_thread(write_job, output.path / run_folder.JOB, job, options.base)
    now = await asyncio.to_thread(date_of_prompts, start.checkpoint)
    inputs = await asyncio.to_thread(read_inputs, job, options.base, output.model, now)
    model = await asyncio.to_thread(start_model.describe, spec.model, inputs.model.path, inputs.critic)
    if start.checkpoint is not None:
        await asyncio.to_thread(start_model.check_same, start.checkpoint, model, own=start.own)
    inputs = replace(inputs, model=await _seen_by_all(inputs.model, held))
    await asyncio.to_thread(output.point_to_model, inputs.model.path)
    held.record.reads(_model_of(inputs))
    engines = 0 if inside_ranks(spec) else engine_count(spec)
    if roll_backs == 0:
        controls.view.start(_summary_of(job, inputs, output, start, controls.end))
    sinks = await asyncio.to_thread(_open_sinks, job, output, start, controls.view)
    stack.push_async_exit(closing(sinks.close))
    patience = float(spec.deadlines.progress_seconds)
    ledger = await asyncio.to_thread(_open_ledger, options, output, held.fence.attempt, patience)
    stack.push_async_exit(closing_ledger(ledger, held.fence))
    controls.steering.record_with(ledger.command)
    stack.callback(controls.steering.record_with, None)
    held.record.counted_by(ledger)
    controls.standing.counted_by(ledger)
    shelf = Shelf(ledger.path.parent)
    stack.push_async_exit(closing(shelf.close))
    stack.push_async_exit(closing(held.state.checkpoints.clean_own))  # when the ranks have ended
    cpus = spec.trainer.ranks + engines + scorer_count(spec) + judge_count(spec)
    await stack.enter_async_context(ray_beside(cpus, controls.stop.listen))
    await refuse_absent_gpus(spec, by_role=options.by_role)
    parts = await assemble(
        job,
        inputs,
        base=options.base,
        episodes=output.path / run_folder.EPISODES,
        records=output.path,
        checkpoints=held.state.checkpoints if options.keeps_state else None,
        sinks=sinks,
        view=controls.view,
        times=controls.times,
        waits=controls.waits,
        stack=stack,
        by_role=options.by_role,
        ledger=ledger,
        shelf=shelf,
        fence=held.fence,
        start_model=model,
        roll_backs=roll_backs,
    )
    controls.standing.built(parts.engines.pool, parts.engines.count, spec.trainer.ranks, parts.scoring)
    session = Session(parts, controls)
    held.record.lives_in(session)
    return session


async def refuse_absent_gpus(spec: ResolvedSpec, *, by_role: bool) -> None:
    """Raises ``JobFileError`` where the private Ray has fewer GPUs than the job takes. A cluster's nodes may come
    later: there everybody waits."""
    if not by_role and "RAY_ADDRESS" not in os.environ:
        await check_gpus_of_machine(spec)


async def _seen_by_all(model: ModelFolder, held: _Held) -> ModelFolder:
    """The model where all nodes find it."""
    options, output, copy = held.options, held.output, held.state.model
    if copy is None:
        if options.storage is None:
            return model
        linked = output.model if options.keeps_state else None
        return await asyncio.to_thread(on_shared_storage, model, options.storage, linked)
    seconds = float(held.job.spec.deadlines.start_seconds)
    try:
        async with asyncio.timeout(seconds):
            with held.controls.waits.wait("driver", f"the model to be copied to {copy}", seconds):
                await asyncio.to_thread(send_model, model.path, copy)
    except TimeoutError:
        raise DeadlineError(
            f"copying the model to {copy} took longer than {seconds:.0f} s (deadlines.startSeconds); raise it if the "
            "store is slow, or check the store if it hangs"
        ) from None
    if options.storage is None or is_below(model, options.storage):
        return model
    await asyncio.to_thread(output.point_to_model, model.path)
    return replace(model, path=output.model, address=copy.address)


def _open_ledger(options: RunOptions, output: OutputFolder, attempt: int, patience_seconds: float) -> Ledger:
    return Ledger(_ledger_path(options, output), attempt, patience_seconds)


def _ledger_path(options: RunOptions, output: OutputFolder) -> Path:
    """SQLite wants a local disk; where the output folder is shared storage, checkpoints carry copies there."""
    if options.storage is None:
        return output.path / LEDGER
    folder = Path(tempfile.gettempdir(), "rljob", output.path.name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / LEDGER


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


def _summary_of(job: ResolvedJob, inputs: Inputs, output: OutputFolder, start: Start, end: RunEnd) -> JobSummary:
    spec = job.spec
    resumed = None if start.checkpoint is None else start.checkpoint.step
    return JobSummary(
        name=job.metadata.name,
        algorithm=spec.algorithm.preset,
        model=_model_of(inputs),
        mode=f"{spec.pipeline.mode}, {spec.placement}, {spec.rollout.engine} engine",
        output=str(output.path),
        total_steps=end.total_steps,
        first_step=(resumed or 0) + 1,
        note="" if resumed is None else f"from step {resumed}",
    )


def _model_of(inputs: Inputs) -> str:
    return f"{inputs.model.family}, {inputs.model.parameters / 1e6:.3g} M parameters"


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, RLJobError) else writable(f"{type(error).__name__}: {error}")
