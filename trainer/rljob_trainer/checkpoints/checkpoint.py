"""What a checkpoint is to those who go on from it, and what keeps the checkpoints of one run."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rljob_trainer.errors import BucketError, CheckpointError, OtherFormatError, UnreadableError

FORMAT = 5
MANIFEST = "manifest.json"
DRIVER = "driver.json"
LEARNER = "learner"

Report = Callable[[str], None]
SaveLearner = Callable[[str], Awaitable[None]]
"""Given the folder or the address that the ranks write to."""
SaveRest = Callable[[Path], Awaitable[None]]
"""Given the folder that the driver's other files go to."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint."""

    step: int
    place: str
    """Its folder or address."""
    files: Callable[[], Path] = field(repr=False, compare=False)
    """The local folder with the driver's part, which the first call may have to fetch. May raise ``BucketError``."""

    @property
    def learner(self) -> str:
        """What ``Learner.load`` takes."""
        return f"{self.place}/{LEARNER}"


def driver_state(files: Path) -> dict[str, Any]:
    """What was given to ``write``, from a checkpoint's ``files()``. Raises ``CheckpointError``."""
    try:
        state: dict[str, Any] = json.loads((files / DRIVER).read_text())
        if not isinstance(state, dict):
            raise ValueError(f"expected a map, not a {type(state).__name__}")
    except OSError as error:
        raise unreadable(files / DRIVER, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{files / DRIVER} is not the state of a run: {error}") from error
    return state


def unreadable(file: Path, error: OSError) -> UnreadableError:
    return UnreadableError(
        f"{file} cannot be read: {error.strerror or error}. Its checkpoint may be intact, so no earlier one is used. "
        "Fix the permissions or the storage and start again (or, to skip this checkpoint, move its folder away)."
    )


class Checkpoints(Protocol):
    """The checkpoints of one run, at one place.

    Usage::

        await checkpoints.write(step, driver_state, save_learner=learner.save)
        newest = latest(checkpoints, report=view.message)
    """

    @property
    def place(self) -> str:
        """Where they lie, for people."""

    async def write(
        self,
        step: int,
        driver_state: dict[str, object],
        save_learner: SaveLearner,
        save_rest: SaveRest | None = None,
        may_commit: Callable[[], None] = lambda: None,
    ) -> Checkpoint:
        """Writes the checkpoint of ``step`` and removes those beyond the newest few.

        ``save_rest`` adds files of its own. ``may_commit`` raises when another process has taken the place over: it
        is asked before anything is written, since ranks may write on for a moment when their driver ends, and again
        before the checkpoint counts.
        Raises ``CheckpointError`` when it cannot be written; earlier checkpoints are untouched then.
        """

    def steps(self) -> list[int]:
        """The steps whose checkpoints seem to be there, in order."""

    def open(self, step: int) -> Checkpoint:
        """Verifies the checkpoint of ``step``. Raises ``CheckpointError`` naming the file that is wrong."""

    def clean(self) -> None:
        """Removes what an interrupted write has left, whoever's it was."""

    def clean_own(self) -> None:
        """Removes what this object's own failed writes have left, once nobody writes any more: ranks and threads don't
        hear at once that a write is given up, and may add a file to what is just being removed."""

    def discard_after(self, step: int) -> list[str]:
        """Sets checkpoints of later steps aside, those of a run that is being rolled back and those that do not verify,
        and returns where they are now. No start deletes any: as many as are kept otherwise stay until later checkpoints
        have been set aside and the next one has been written."""


def latest(checkpoints: Checkpoints, report: Report) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None. Each broken one is told to ``report``.

    Raises ``BucketError`` when the store does not answer, ``UnreadableError`` when a file cannot be read and
    ``OtherFormatError`` when another version wrote it: that is no reason to go back behind a good checkpoint, which
    would be set aside as one of a run that was rolled back.
    """
    left = checkpoints.steps()
    while left:
        try:
            return checkpoints.open(left.pop())
        except (BucketError, OtherFormatError, UnreadableError):
            raise
        except CheckpointError as error:
            report(f"{error} {'Trying the previous checkpoint.' if left else 'There is no earlier checkpoint.'}")
    return None


def verified_manifest(text: str | bytes, place: str) -> tuple[int, dict[str, list[Any]]]:
    """Step and listed files of a manifest. Raises ``CheckpointError``, also ``OtherFormatError``."""
    try:
        manifest = json.loads(text)
        if (found := manifest["format"]) != FORMAT:
            raise OtherFormatError(
                f"checkpoint {place} has format {found}; this version of rljob reads {FORMAT}. Continue with the "
                "version that wrote it, or use another output folder with this one."
            )
        listed = {str(name): [size, digest] for name, (size, digest) in dict(manifest["files"]).items()}
        step = int(manifest["step"])
        if DRIVER not in listed:
            raise ValueError(f"it lists no {DRIVER}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {place} has an unreadable {MANIFEST}: {error}.") from error
    return step, listed


def manifest(step: int, files: dict[str, list[Any]]) -> str:
    return json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1)


def name_of(step: int) -> str:
    return f"step-{step:08d}"
