"""Which weights a checkpoint belongs to: the manifest that they were published with, kept in the driver's part.

The learner's part says for itself whether its tensors were saved together. That they are the weights of this step, and
that what is published after a restart is what was published before it, is said here, whatever number of ranks reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljob_trainer.errors import CheckpointError
from rljob_trainer.weights.manifest import Version

STATE = "weights"
"""Where it is in the driver's state."""


def state_of(published: Version | None, dtype: str) -> dict[str, str] | None:
    """``dtype``: that in which weights are published, which the manifest depends on."""
    return None if published is None else {"manifest": published.manifest_sha256, "dtype": dtype}


def check(state: Mapping[str, Any], published: Version | None, dtype: str, place: str) -> None:
    """Raises ``CheckpointError`` when the weights that were read from ``place`` and published are others than those of
    the checkpoint. Published in another dtype, as another job may, they cannot be compared."""
    kept = state[STATE]
    if kept is None or published is None or kept["dtype"] != dtype:
        return
    if kept["manifest"] != published.manifest_sha256:
        raise CheckpointError(
            f"the weights in {place} are not those that the step was saved with: they have the manifest "
            f"{published.manifest_sha256[:12]}, the checkpoint's is {kept['manifest'][:12]}. The learner's part was "
            "damaged or is another step's: use another checkpoint (`rljob run --resume PLACE`), as it was written"
        )
