"""What a run starts from: nothing, its own last checkpoint, or one that the user names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob_trainer.checkpoint import Checkpoint, CheckpointStore, open_checkpoint
from rljob_trainer.driver.output import OutputFolder
from rljob_trainer.errors import CheckpointError

AUTO = "auto"
NEVER = "never"


@dataclass(frozen=True, slots=True)
class Start:
    """``checkpoint`` None: from the job's model. ``own``: the output folder's earlier steps are this run's past."""

    checkpoint: Checkpoint | None
    own: bool


def where_to_start(resume: str, output: OutputFolder, store: CheckpointStore, report: Callable[[str], None]) -> Start:
    """``resume`` is auto, never or the path of a checkpoint (or of a folder with checkpoints).

    Whatever an earlier run left and this one does not continue is set aside, never deleted. Raises ``CheckpointError``
    when the named checkpoint cannot be used.
    """
    store.clean()
    if resume == AUTO:
        latest = store.latest(report) if output.holds_a_run else None
        if latest is not None:
            store.discard_after(latest.step)
            report(f"resuming from the checkpoint of step {latest.step}")
            return Start(latest, own=True)
    elif resume != NEVER:
        named = _named(Path(resume), report)
        if named.path.parent.resolve() == store.folder.resolve():
            store.discard_after(named.step)
            return Start(named, own=True)
        _set_aside(output, report)
        return Start(named, own=False)
    _set_aside(output, report)
    return Start(None, own=False)


def _named(path: Path, report: Callable[[str], None]) -> Checkpoint:
    for folder in (path, path / "checkpoints"):
        if any(folder.glob("step-*")):
            latest = CheckpointStore(folder, keep=1).latest(report)
            if latest is None:
                raise CheckpointError(f"--resume {path}: no checkpoint in {folder} is whole")
            return latest
    return open_checkpoint(path)


def _set_aside(output: OutputFolder, report: Callable[[str], None]) -> None:
    aside = output.set_aside()
    if aside is not None:
        report(f"what an earlier run left here is now in {aside}")
