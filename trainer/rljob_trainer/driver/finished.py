"""A run that is over (or goes on elsewhere), read from where its state is: its checkpoints, its model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rljob_api.spec.lora import Lora
from rljob_trainer.checkpoints.checkpoint import Checkpoint, Report
from rljob_trainer.checkpoints.finding import find_checkpoint
from rljob_trainer.errors import CheckpointError
from rljob_trainer.models.sharing import fetch_model
from rljob_trainer.record.output import START
from rljob_trainer.storage import is_address
from rljob_trainer.storage.bucket import ObjectBucket
from rljob_trainer.storage.small import BucketFile, LocalFile, SmallFile
from rljob_trainer.telemetry.run_folder import JOB

if TYPE_CHECKING:
    from rljob_trainer.learner.backend import BackendRank


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, and the model folder that its run started from."""

    checkpoint: Checkpoint
    model: Path
    trust_remote_code: bool = False
    """Whether the run's job lets the model bring code of its own."""
    lora: Lora | None = None
    """The adapters that the run trained; None: the model's own weights."""
    source: str | None = None
    """The model's name in the run's job; None: its weights were random."""


def find_trained(place: str | Path, step: int | None, scratch: Path, report: Report) -> Found:
    """``place`` is that of a run or of one of its checkpoints; ``step`` None means the newest that is whole.

    ``scratch`` is a local folder for what has to be fetched. Raises ``CheckpointError``.
    """
    checkpoint = find_checkpoint(place, scratch / "checkpoint", report, step)
    beside = f"{_above(_above(checkpoint.place))}/{START}"
    model = Path(beside)
    if is_address(beside):
        report(f"fetching the model that the run started from, {beside}")
        model = scratch / START
        fetch_model(model, beside)
    elif not (model / "config.json").exists():
        raise CheckpointError(f"the model that the run started from is not at {model}; put its folder back")
    return _found(checkpoint, model, _above(_above(checkpoint.place)))


def load_actor(found: Found) -> BackendRank:
    """The trained policy in this process, whatever the backend, the ranks and the optimizer that trained it.

    Raises ``CheckpointError`` and, for a model folder that cannot be read, ``JobFileError``.
    """
    from rljob_trainer.learner.settings import LearnerSettings, LoraSettings
    from rljob_trainer.learner.starting import one_rank

    lora = None if found.lora is None else LoraSettings.from_spec(found.lora)
    rank = one_rank(LearnerSettings(model_path=found.model, trust_remote_code=found.trust_remote_code, lora=lora))
    rank.load_weights(found.checkpoint.learner)
    return rank


def _found(checkpoint: Checkpoint, model: Path, run: str) -> Found:
    """With what a run's job says of its model. Raises ``CheckpointError`` for a file that holds no job."""
    file: SmallFile = BucketFile(ObjectBucket(run), JOB) if is_address(run) else LocalFile(Path(run) / JOB)
    text = file.read()
    if text is None:
        return Found(checkpoint, model)
    try:
        said = yaml.safe_load(text)["spec"]["model"]
        lora = None if said.get("lora") is None else Lora.model_validate(said["lora"])
        return Found(checkpoint, model, bool(said.get("trustRemoteCode")), lora, said.get("source"))
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{run}/{JOB} is not the job of a run ({type(error).__name__}). Restore the run's original file: it is "
            "needed to know whether the model may run its own code and which part was trained"
        ) from error


def _above(place: str) -> str:
    return place.rpartition("/")[0] if is_address(place) else str(Path(place).absolute().parent)
