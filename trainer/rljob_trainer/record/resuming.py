"""What a run starts from: nothing, its own last checkpoint, or one that the user names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob_trainer.checkpoints.checkpoint import Checkpoint, Checkpoints, Report, latest
from rljob_trainer.checkpoints.finding import find_checkpoint
from rljob_trainer.errors import CheckpointError
from rljob_trainer.record.output import OutputFolder
from rljob_trainer.record.place import State
from rljob_trainer.storage import is_address

AUTO = "auto"
NEVER = "never"
_FETCHED = ".fetched"
"""In the output folder: the driver's part of another run's checkpoint, if that lies in a bucket."""


@dataclass(frozen=True, slots=True)
class Start:
    """``checkpoint`` None: from the job's model. ``own``: the output folder's earlier steps are this run's past."""

    checkpoint: Checkpoint | None
    own: bool


def where_to_start(
    resume: str,
    restore: str | None,
    output: OutputFolder,
    state: State,
    report: Report,
    check_job: Callable[[], None] = lambda: None,
) -> Start:
    """``resume`` is auto, never, or the place of a checkpoint or of a run. ``restore`` is such a place too, for a run
    that has nothing of its own to go on from. ``check_job`` is called, and may raise, before the run goes on from one
    of its own checkpoints.

    Whatever an earlier run left and this one does not continue is set aside, never deleted. Raises ``CheckpointError``
    when the named checkpoint cannot be used, or none of those that the run has.
    """
    own = state.checkpoints
    own.clean()
    if resume == AUTO:
        newest = latest(own, report) if output.holds_a_run else None
        if newest is not None:
            check_job()
            _discard_after(newest, own, report)
            report(f"resuming from the checkpoint of step {newest.step}")
            return Start(newest, own=True)
        if output.holds_a_run and (steps := own.steps()):
            raise CheckpointError(
                f"none of the checkpoints in {own.place} can be used (steps {', '.join(map(str, steps))}); repair one "
                "or restore a copy. `rljob run --resume never` starts over and sets them aside; on a cluster, create a "
                "new job or move the folder away"
            )
        if output.holds_a_run and restore is None:
            report(f"an earlier run in {output.path} ended before its first checkpoint, so this one starts over")
    named = restore if resume == AUTO else None if resume == NEVER else resume
    if named is None:
        _set_aside(output, state, report)
        return Start(None, own=False)
    found = find_checkpoint(named, output.path / _FETCHED, report)
    if _folder_of(found.place) == _folder_of(f"{own.place}/any"):
        check_job()
        _discard_after(found, own, report)
        return Start(found, own=True)
    report(f"starting from the checkpoint of step {found.step} in {found.place}")
    _set_aside(output, state, report)
    return Start(found, own=False)


def _discard_after(used: Checkpoint, own: Checkpoints, report: Report) -> None:
    for place in own.discard_after(used.step):
        report(f"set aside a checkpoint after step {used.step}: {place}; the last checkpoint.keep of these are kept")


def _folder_of(place: str) -> str:
    above = place.rpartition("/")[0]
    return above if is_address(place) else str(Path(above).resolve())


def _set_aside(output: OutputFolder, state: State, report: Report) -> None:
    aside = output.set_aside()
    if aside is not None:
        state.set_aside(aside.name)
        report(f"moved the files of an earlier run to {aside}")
