"""Where the state of a run is kept: in its output folder, or in a bucket of which that is a working copy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from rljob_trainer.checkpoints.bucket import BucketCheckpoints
from rljob_trainer.checkpoints.checkpoint import Checkpoints
from rljob_trainer.checkpoints.finding import FOLDER
from rljob_trainer.checkpoints.folder import FolderCheckpoints
from rljob_trainer.errors import CheckpointError
from rljob_trainer.record import fence, ledger
from rljob_trainer.record.output import START, OutputFolder
from rljob_trainer.storage.bucket import ObjectBucket
from rljob_trainer.storage.copies import Copies
from rljob_trainer.storage.small import BucketFile, LocalFile, SmallFile

_SEND_SECONDS = 60.0

_log = logging.getLogger(__name__)


class State(Protocol):
    """What outlives a run, and where."""

    @property
    def place(self) -> str:
        """For people, and for ``restore.from``."""

    @property
    def checkpoints(self) -> Checkpoints: ...

    @property
    def attempt(self) -> SmallFile:
        """Which attempt may write."""

    @property
    def model(self) -> ObjectBucket | None:
        """Where the model is copied to, for nodes that cannot see the output folder; None: they can."""

    def bring(self) -> None:
        """Makes the output folder what the last attempt left. Raises ``BucketError``."""

    def set_aside(self, name: str) -> None:
        """What the output folder has just put into ``name``. Raises ``BucketError``."""

    def began(self) -> None:
        """This attempt has taken over, and the output folder is in order. Raises ``BucketError``."""

    def keep(self) -> None:
        """Saves the run's files as they are now. Raises ``BucketError``."""


def state_of(output: OutputFolder, address: str | None, keep: int) -> State:
    """``address``: where the state is kept, if not in the output folder; ``keep``: checkpoints that stay."""
    return _InFolder(output, keep) if address is None else _InBucket(output, ObjectBucket(address), keep)


@asynccontextmanager
async def kept_up_to_date(state: State, may_write: Callable[[], None]) -> AsyncIterator[None]:
    """Saves the run's files every minute. A store that cannot be reached is logged: training matters more.

    ``may_write`` raises ``FencedError`` when another attempt has taken over, whose files are there by now.
    """
    keeping = asyncio.create_task(_keep(state, may_write))
    try:
        yield
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping


async def _keep(state: State, may_write: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_SEND_SECONDS)
        try:
            await asyncio.to_thread(may_write)
            await asyncio.to_thread(state.keep)
        except (fence.FencedError, fence.RemovedError):
            return  # whoever watches the fence ends the run
        except (CheckpointError, OSError) as error:  # a file here that cannot be read now may be in a minute
            _log.warning("%s", error)


class _InFolder:
    def __init__(self, output: OutputFolder, keep: int) -> None:
        self.place = str(output.path)
        self.checkpoints = FolderCheckpoints(output.path / FOLDER, keep)
        self.attempt = LocalFile(output.path / fence.FILE)
        self.model = None

    def bring(self) -> None:
        """It is there."""

    def set_aside(self, name: str) -> None:
        """It has been put there."""

    def began(self) -> None:
        """Everything is where it belongs."""

    def keep(self) -> None:
        """It is kept as it is written."""


class _InBucket:
    def __init__(self, output: OutputFolder, bucket: ObjectBucket, keep: int) -> None:
        self.place = bucket.address
        self._bucket = bucket
        self.attempt = BucketFile(bucket, fence.FILE)
        self.model = bucket.below(START)
        self._here = LocalFile(output.path / fence.FILE)
        """Which attempt the output folder is of: it may be gone on elsewhere since."""
        own = (FOLDER, START, fence.FILE, ledger.FILE, *(f"{ledger.FILE}{end}" for end in ("-wal", "-shm")))
        self._copies = Copies(output.path, bucket, own)
        scratch: Path = output.path / FOLDER
        self.checkpoints = BucketCheckpoints(bucket.below(FOLDER), keep, scratch, before_commit=self._copies.send)

    def bring(self) -> None:
        if fence.read(self._here)[0] != fence.read(self.attempt)[0]:
            self._copies.bring()

    def set_aside(self, name: str) -> None:
        checkpoints = self.checkpoints.bucket
        checkpoints.move(checkpoints.files(), self._bucket.below(f"{name}/{FOLDER}"))

    def began(self) -> None:
        self._here.write(self.attempt.read() or "")
        self._copies.send_all()

    def keep(self) -> None:
        self._copies.send()
