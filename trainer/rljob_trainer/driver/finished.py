"""A run that is over (or goes on elsewhere), read from where its state is: its checkpoints, its model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.checkpoints.checkpoint import Checkpoint, Report
from rljob_trainer.checkpoints.finding import find_checkpoint
from rljob_trainer.driver.state import MODEL
from rljob_trainer.errors import CheckpointError
from rljob_trainer.models.sharing import fetch_model
from rljob_trainer.storage import is_address

if TYPE_CHECKING:
    from rljob_trainer.learner.rank import LearnerRank


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, and the model folder that its run started from."""

    checkpoint: Checkpoint
    model: Path


def find_trained(place: str | Path, step: int | None, scratch: Path, report: Report) -> Found:
    """``place`` is that of a run or of one of its checkpoints; ``step`` None means the newest that is whole.

    ``scratch`` is a local folder for what has to be fetched. Raises ``CheckpointError``.
    """
    checkpoint = find_checkpoint(place, scratch / "checkpoint", report, step)
    beside = f"{_above(_above(checkpoint.place))}/{MODEL}"
    model = Path(beside)
    if is_address(beside):
        report(f"fetching the model that the run started from, {beside}")
        model = scratch / MODEL
        fetch_model(model, beside)
    elif not (model / "config.json").exists():
        raise CheckpointError(f"the model that the run started from is not at {model}; was the folder moved?")
    return Found(checkpoint, model)


def load_actor(found: Found) -> LearnerRank:
    """The trained policy in this process, whatever the number of ranks that trained it."""
    from rljob_trainer.learner.rank import LearnerRank
    from rljob_trainer.learner.settings import LearnerSettings

    rank = LearnerRank(LearnerSettings(model_path=found.model))
    rank.load(found.checkpoint.learner)
    return rank


def _above(place: str) -> str:
    return place.rpartition("/")[0] if is_address(place) else str(Path(place).absolute().parent)
