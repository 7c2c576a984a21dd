"""A run that is over (or goes on elsewhere), read from its output folder: its job, its checkpoints, its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.checkpoint import MANIFEST, Checkpoint, CheckpointStore, open_checkpoint
from rljob_trainer.errors import CheckpointError

if TYPE_CHECKING:
    from rljob_trainer.learner.rank import LearnerRank


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, and the model folder that its run started from."""

    checkpoint: Checkpoint
    model: Path


def find_checkpoint(folder: Path, step: int | None, report: Callable[[str], None]) -> Found:
    """``folder`` is a run's output folder or one of its checkpoints; ``step`` None means the newest that is whole.

    Raises ``CheckpointError``.
    """
    if (folder / MANIFEST).exists():
        checkpoint = open_checkpoint(folder)
    elif step is not None:
        checkpoint = open_checkpoint(folder / "checkpoints" / f"step-{step:08d}")
    else:
        latest = CheckpointStore(folder / "checkpoints", keep=1).latest(report)
        if latest is None:
            raise CheckpointError(f"{folder} holds no whole checkpoint; is it the output folder of a run?")
        checkpoint = latest
    model = checkpoint.path.absolute().parent.parent / "model"
    if not (model / "config.json").exists():
        raise CheckpointError(f"the model that the run started from is not at {model}; was the folder moved?")
    return Found(checkpoint, model)


def load_actor(found: Found) -> LearnerRank:
    """The trained policy in this process, whatever the number of ranks that trained it."""
    from rljob_trainer.learner.rank import LearnerRank
    from rljob_trainer.learner.settings import LearnerSettings

    rank = LearnerRank(LearnerSettings(model_path=found.model))
    rank.load(found.checkpoint.learner)
    return rank
