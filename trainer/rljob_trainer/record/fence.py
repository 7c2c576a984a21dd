"""Which attempt may write: one small file beside the checkpoints, read before every commit and every publication.

A driver that was given up (its node was cut off, the operator began another attempt) may come back to life. It finds a
newer attempt in the file, at the latest a few seconds later, and ends without having changed anything. The file also
holds a number above every policy version that was published, for the case that the ledger's own file is lost together
with its node.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time

from rljob_trainer.errors import (
    CheckpointError,
    OutputError,
    RLJobError,
    UnreachableError,
    UnreadableError,
    lacks_room,
    reading_failed,
)
from rljob_trainer.storage.small import SmallFile

_log = logging.getLogger(__name__)
FILE = "attempt.json"
_PAUSE_SECONDS = 1.0
_RESERVED = 64
"""Version numbers reserved at a time, so that not every publication writes the file."""


class FencedError(RLJobError):
    """A newer attempt has taken over (exit code 75; nobody waits for it)."""

    exit_code = 75


class RemovedError(OutputError):
    """The folder that the run writes into was removed while it went on."""


class Fence:
    """The right to write where the state of one job is kept."""

    def __init__(self, file: SmallFile, attempt: int, versions: int) -> None:
        self._file = file
        self.attempt = attempt
        self.versions = versions
        """No number above this one was ever published before this attempt."""
        self._reserved = versions
        self.lost = False
        """Whether another attempt is known to have taken over, or the folder to be gone: nothing there is this one's
        any more."""

    @classmethod
    def take(cls, file: SmallFile, attempt: int | None = None) -> Fence:
        """Becomes the newest attempt; None: the one after the last. ``file``: where that is written down.

        Raises ``FencedError``, ``OutputError`` and ``BucketError``.
        """
        last, versions = read(file)
        attempt = last + 1 if attempt is None else attempt
        if last > attempt:
            raise FencedError(f"attempt {last} has taken over ({file.place}); attempt {attempt} must not continue")
        fence = cls(file, attempt, versions)
        fence._write(versions)
        return fence

    def check(self) -> None:
        """Raises ``FencedError`` when another attempt has taken over, ``RemovedError`` when the file is gone."""
        newest, _ = read(self._file)
        if newest == 0 and self._file.read() is None:
            self.lost = True
            raise RemovedError(
                f"{self._file.place} is gone: the folder was removed, emptied or renamed during the run, with its "
                "metrics and checkpoints. Restore it and start again to continue from the last checkpoint; without it "
                "the same command starts over."
            )
        if newest != self.attempt:
            self.lost = True
            raise FencedError(f"attempt {newest} has taken over; attempt {self.attempt} no longer saves or publishes")

    def announce(self, version: int) -> None:
        """Before a publication: checks, and makes sure that the number is below the one in the file."""
        self.check()
        if version > self._reserved:
            self._write(version + _RESERVED)

    async def announce_patiently(self, version: int, seconds: float) -> None:
        """``announce`` in a thread; again and again, for so many seconds, while the disk is full or does not answer, or
        the store doesn't."""
        began, told = time.monotonic(), False
        while True:
            try:
                return await asyncio.to_thread(self.announce, version)
            except (OutputError, UnreadableError, UnreachableError) as error:
                left = seconds - (time.monotonic() - began)
                may_pass = lacks_room(error) or isinstance(error, UnreadableError | UnreachableError)
                if left <= 0 or not may_pass:
                    raise
                if not told:
                    _log.warning("%s: the run waits for up to %.0f s", error, left)
                told = True
            await asyncio.sleep(_PAUSE_SECONDS)

    def _write(self, reserved: int) -> None:
        self._file.write(json.dumps({"attempt": self.attempt, "versions": reserved}) + "\n")
        self._reserved = reserved


def read(file: SmallFile) -> tuple[int, int]:
    """Attempt and version in the file; zeros when there is none. Raises ``CheckpointError``."""
    try:
        text = file.read()
        if text is None:
            return 0, 0
        said = json.loads(text)
        return int(said["attempt"]), int(said["versions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        kind = UnreadableError if reading_failed(error) else CheckpointError
        raise kind(
            f"{file.place} cannot be read ({error}): it says which attempt may write; remove it if no other driver runs"
        ) from error
