"""Which weights a checkpoint belongs to: the manifest that they were published with, kept in the driver's part.

The learner's part says for itself whether its tensors were saved together. That they are the weights of this step, and
that what is published after a restart is what was published before it, is said here, whatever number of ranks reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_trainer.errors import CheckpointError
from rljob_trainer.weights.manifest import Version


@dataclass(frozen=True, slots=True)
class Published:
    """The weights at a boundary, as they were published."""

    manifest: str
    """SHA-256."""
    dtype: str
    """In which they were published: the manifest depends on it."""


def published(version: Version | None, dtype: str) -> Published | None:
    """None: nothing has been published."""
    return None if version is None else Published(version.manifest_sha256, dtype)


def check(saved: Published | None, read: Published | None, place: str) -> None:
    """Raises ``CheckpointError`` when the weights that were ``read`` from ``place`` and published are others than those
    that the checkpoint was ``saved`` with. In another dtype, as another job may publish, they cannot be compared."""
    if saved is None or read is None or saved.dtype != read.dtype or saved.manifest == read.manifest:
        return
    raise CheckpointError(
        f"the weights in {place} are not those of the saved step: their manifest is {read.manifest[:12]}, the "
        f"checkpoint's is {saved.manifest[:12]}. The learner's part was damaged or belongs to another step; use "
        "another, unmodified checkpoint (`rljob run --resume PLACE`)"
    )
