"""A model whose weights never change in a run, on whichever node it is computed: of rewards, of judges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.materialise import fetch
from rljob_trainer.models.version import version_of


@dataclass(frozen=True, slots=True)
class FixedModel:
    """Where each node finds the model, and what it has to be."""

    field: str
    """Of the job file, for messages."""
    source: str
    """A path or hub id."""
    revision: str | None
    base: Path
    """Where a relative path starts."""
    version: str
    """A digest of its files (``version.py``)."""

    def folder(self) -> Path:
        """Its files on this node, which takes those of a hub from there. Raises ``JobFileError`` when there are none,
        or they are not those that the driver has."""
        folder = fetch(self.source, self.field, base=self.base, revision=self.revision)
        if (version := version_of(folder)) != self.version:
            raise JobFileError(
                f"{self.field}: {folder} is another model on this node (version {version}) than on the driver's node "
                f"({self.version}); set its revision to a commit, or use a path that is the same in all pods"
            )
        return folder


def fixed_model(field: str, source: str, revision: str | None, base: Path) -> FixedModel:
    """The model with the version that its files have here. Raises ``JobFileError`` when there are none."""
    return FixedModel(field, source, revision, base, version_of(fetch(source, field, base=base, revision=revision)))
