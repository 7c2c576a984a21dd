"""A reward model as those are told of it who compute it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.materialise import fetch
from rljob_trainer.rewards.reward_model.version import version_of

if TYPE_CHECKING:
    from rljob_api.spec.reward_model import RewardModelSpec


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Which model, and how it is computed."""

    name: str
    """Of the term of the reward."""
    field: str
    """Of the job file, for messages."""
    spec: RewardModelSpec
    base: Path
    """Where a relative path starts."""
    version: str
    """A digest of its files (``version.py``)."""


def found(name: str, field: str, spec: RewardModelSpec, base: Path) -> ServedModel:
    """The model with the version that its files have here. Raises ``JobFileError`` when there are none."""
    folder = fetch(spec.source, field, base=base, revision=spec.revision)
    return ServedModel(name, field, spec, base, version_of(folder))


def folder_of(model: ServedModel) -> Path:
    """Its files on this node, which takes those of a hub from there. Raises ``JobFileError`` when there are none, or
    they are not those that the driver has."""
    folder = fetch(model.spec.source, model.field, base=model.base, revision=model.spec.revision)
    if (version := version_of(folder)) != model.version:
        raise JobFileError(
            f"{model.field}: {folder} is another model on this node (version {version}) than where the driver is "
            f"({model.version}); write a commit as its revision, or a path that is the same in all pods"
        )
    return folder
