"""The checkpoint that a user names: by its own place, or by that of a run (then its newest)."""

from __future__ import annotations

import os
from pathlib import Path

from rljob_trainer.checkpoints.bucket import BucketCheckpoints, open_address
from rljob_trainer.checkpoints.checkpoint import MANIFEST, Checkpoint, Checkpoints, Report, latest
from rljob_trainer.checkpoints.folder import FolderCheckpoints, open_folder
from rljob_trainer.errors import CheckpointError
from rljob_trainer.storage import is_address
from rljob_trainer.storage.bucket import ObjectBucket

FOLDER = "checkpoints"
"""Inside a run's output folder, or its address."""


def find_checkpoint(place: str | Path, scratch: Path, report: Report, step: int | None = None) -> Checkpoint:
    """``place`` is a checkpoint, a run's output folder, its state's address, or the ``checkpoints`` in one of those.

    ``scratch`` is a local folder for what has to be fetched. Raises ``CheckpointError``.
    """
    place = str(place).rstrip("/")
    if (own := _opened(place, scratch)) is not None:
        return own
    for where in (place, f"{place}/{FOLDER}"):
        checkpoints = _at(where, scratch)
        if steps := checkpoints.steps():
            if step is not None and step not in steps:
                raise CheckpointError(f"{where} has no checkpoint of step {step}; it has checkpoints of steps {steps}")
            found = latest(checkpoints, report) if step is None else checkpoints.open(step)
            if found is None:
                raise CheckpointError(f"no checkpoint in {where} is intact; it has checkpoints of steps {steps}")
            return found
    raise CheckpointError(f"{place} has no complete checkpoint; pass a checkpoint or the output folder of a run")


def holds_checkpoints(place: str | Path) -> bool:
    """Whether a run has left any at its place. Raises ``BucketError``."""
    return bool(_at(f"{str(place).rstrip('/')}/{FOLDER}", Path()).steps())


def _opened(place: str, scratch: Path) -> Checkpoint | None:
    """The checkpoint that the place itself is."""
    if not is_address(place):
        return open_folder(Path(place)) if os.path.lexists(Path(place) / MANIFEST) else None
    bucket = ObjectBucket(place)
    return None if bucket.read(MANIFEST) is None else open_address(bucket, scratch)


def _at(place: str, scratch: Path) -> Checkpoints:
    if is_address(place):
        return BucketCheckpoints(ObjectBucket(place), 1, scratch)
    return FolderCheckpoints(Path(place), 1)
