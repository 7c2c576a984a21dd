"""Which attempt may write: one small file beside the checkpoints, read before every commit and every publication.

A driver that was given up (its node was cut off, the operator began another attempt) may come back to life. It finds a
newer attempt in the file, at the latest a few seconds later, and ends without having changed anything. The file also
holds a number above every policy version that was published, for the case that the ledger's own file is lost together
with its node.
"""

from __future__ import annotations

import json
from pathlib import Path

from rljob_trainer.errors import CheckpointError, RLJobError
from rljob_trainer.telemetry.run_folder import write_whole

FILE = "attempt.json"
_RESERVED = 64
"""Version numbers reserved at a time, so that not every publication writes the file."""


class FencedError(RLJobError):
    """A newer attempt has taken over (exit code 75; nobody waits for it)."""

    exit_code = 75


class Fence:
    """The right to write into one output folder."""

    def __init__(self, folder: Path, attempt: int, versions: int) -> None:
        self._path = folder / FILE
        self.attempt = attempt
        self.versions = versions
        """No number above this one was ever published before this attempt."""
        self._reserved = versions
        self.lost = False
        """Whether another attempt is known to have taken over: nothing in the folder is this one's any more."""

    @classmethod
    def take(cls, folder: Path, attempt: int | None = None) -> Fence:
        """Becomes the newest attempt; None: the one after the last. Raises ``FencedError`` and ``OutputError``."""
        last, versions = _read(folder / FILE)
        attempt = last + 1 if attempt is None else attempt
        if last > attempt:
            raise FencedError(f"attempt {last} has taken over {folder}; attempt {attempt} must not go on")
        fence = cls(folder, attempt, versions)
        fence._write()
        return fence

    def check(self) -> None:
        """Raises ``FencedError`` when another attempt has taken over."""
        newest, _ = _read(self._path)
        if newest != self.attempt:
            self.lost = True
            raise FencedError(f"attempt {newest} has taken over; attempt {self.attempt} neither saves nor publishes")

    def announce(self, version: int) -> None:
        """Before a publication: checks, and makes sure that the number is below the one in the file."""
        self.check()
        if version > self._reserved:
            self._reserved = version + _RESERVED
            self._write()

    def _write(self) -> None:
        write_whole(self._path, json.dumps({"attempt": self.attempt, "versions": self._reserved}) + "\n")


def _read(path: Path) -> tuple[int, int]:
    """Attempt and version in the file; zeros when there is none."""
    try:
        said = json.loads(path.read_text())
        return int(said["attempt"]), int(said["versions"])
    except FileNotFoundError:
        return 0, 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): it says which attempt may write; remove it if no other driver runs"
        ) from error
