"""Checkpoints in an object store, where nothing can be renamed.

Each is written under a name of its own, ``step-00000020-1f6c09ab``: the ranks write their shards straight into the
bucket, the driver its part, and ``manifest.json`` comes last, with the size and the tag (ETag) that the store gives
each object. One that has no manifest is no checkpoint; it may be what another attempt is still writing. Removing begins
with the manifest, for the same reason.

Reading compares the store's listing with the manifest, which costs two requests and no data: stores keep checksums of
their own, and ranks read only the parts of the shards that they need.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path

from rljob_trainer.checkpoints.checkpoint import (
    DRIVER,
    LEARNER,
    MANIFEST,
    Checkpoint,
    SaveLearner,
    SaveRest,
    manifest,
    name_of,
    verified_manifest,
)
from rljob_trainer.errors import BucketError, CheckpointError, UnsavedError
from rljob_trainer.storage.bucket import ObjectBucket, StoredObject

_log = logging.getLogger(__name__)

_ASIDE = "aside.json"
"""What the manifest of a checkpoint that was set aside is called; its other objects stay where they are."""
_NAME = re.compile(r"step-(\d{8})-[0-9a-f]{8}")


class BucketCheckpoints:
    """``Checkpoints`` below an address. ``scratch`` is a local folder for the driver's part.

    ``before_commit`` is called when all of a checkpoint is there but its manifest.
    """

    def __init__(
        self, bucket: ObjectBucket, keep: int, scratch: Path, before_commit: Callable[[], None] = lambda: None
    ) -> None:
        self.bucket = bucket
        self.keep = keep
        self._scratch = scratch
        self._before_commit = before_commit
        self._failed: list[ObjectBucket] = []
        """Where writes have failed, though not because the store did: that is not waited for a second time."""

    @property
    def place(self) -> str:
        return self.bucket.address

    async def write(
        self,
        step: int,
        driver_state: dict[str, object],
        save_learner: SaveLearner,
        save_rest: SaveRest | None = None,
        may_commit: Callable[[], None] = lambda: None,
    ) -> Checkpoint:
        """See ``Checkpoints``."""
        await asyncio.to_thread(may_commit)
        name = f"{name_of(step)}-{uuid.uuid4().hex[:8]}"
        target = self.bucket.below(name)
        folder = self._scratch / f"writing-{name}"
        try:
            await save_learner(f"{target}/{LEARNER}")
            await asyncio.to_thread(folder.mkdir, parents=True)
            await asyncio.to_thread((folder / DRIVER).write_text, json.dumps(driver_state))
            if save_rest is not None:
                await save_rest(folder)
            await asyncio.to_thread(self._commit, target, step, folder, may_commit)
        except BaseException as error:
            if not isinstance(error, BucketError):
                self._failed.append(target)
            await asyncio.to_thread(_remove_quietly, target)
            if isinstance(error, OSError):
                raise UnsavedError(
                    f"cannot write the driver's part of the checkpoint of step {step} to {self._scratch}: "
                    f"{error.strerror or error}. Free some space; earlier checkpoints are untouched."
                ) from error
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        try:
            await asyncio.to_thread(self._remove_old, name)
        except BucketError as error:  # the checkpoint is whole, and the next one tries again
            _log.warning("%s", error)
        return self._checkpoint(step, name)

    def _commit(self, target: ObjectBucket, step: int, folder: Path, may_commit: Callable[[], None]) -> None:
        for file in sorted(folder.iterdir()):
            target.upload(file, file.name)
        may_commit()  # what is sent next may be another attempt's by now
        self._before_commit()
        listed = target.files()
        may_commit()
        target.write(MANIFEST, manifest(step, {name: [s.size, s.tag] for name, s in listed.items()}).encode())

    def steps(self) -> list[int]:
        return sorted({_step(name) for name in self._whole(self.bucket.files())})

    def open(self, step: int) -> Checkpoint:
        names = [name for name in self._whole(self.bucket.files()) if _step(name) == step]
        if not names:
            raise CheckpointError(f"{self.bucket} has no complete checkpoint of step {step}.")
        return open_address(self.bucket.below(names[-1]), self._scratch)

    def clean(self) -> None:
        found = self.bucket.files()
        whole = {*self._whole(found), *_with(_ASIDE, found)}
        self.bucket.remove(path for path in found if _top(path) not in whole)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def clean_own(self) -> None:
        while self._failed:
            _remove_quietly(self._failed.pop())

    def discard_after(self, step: int) -> list[str]:
        later = [self.bucket.below(name) for name in self._whole(self.bucket.files()) if _step(name) > step]
        for target in later:
            target.write(_ASIDE, target.read(MANIFEST) or b"")
            target.remove([MANIFEST])
        return [f"{target} (its manifest is now {_ASIDE})" for target in later]

    def _checkpoint(self, step: int, name: str) -> Checkpoint:
        target = self.bucket.below(name)
        return Checkpoint(step, target.address, cache(partial(_fetched, target, self._scratch)))

    def _remove_old(self, newest: str) -> None:
        """Removes the checkpoints beyond ``keep``, also of those set aside, and others of the newest one's step: that
        of an attempt which this one replaced."""
        found = self.bucket.files()
        whole = self._whole(found)
        aside = [name for name in _with(_ASIDE, found) if name not in whole]
        for name in aside[: -self.keep]:
            self.bucket.below(name).remove(path.partition("/")[2] for path in found if _top(path) == name)
        others = [name for name in whole if _step(name) != _step(newest)]
        self._discard([name for name in whole if name not in (*others[len(others) - self.keep + 1 :], newest)])

    def _discard(self, names: Iterable[str]) -> None:
        for name in names:
            target = self.bucket.below(name)
            target.remove([MANIFEST])
            target.remove(target.files())

    @staticmethod
    def _whole(found: Mapping[str, StoredObject]) -> list[str]:
        """Names of checkpoints that have a manifest, in order of their steps."""
        return _with(MANIFEST, found)


def open_address(target: ObjectBucket, scratch: Path) -> Checkpoint:
    """Verifies the checkpoint at an address. Raises ``CheckpointError`` naming the object that is wrong."""
    text = target.read(MANIFEST)
    if text is None:
        raise CheckpointError(f"{target} is not a complete checkpoint: it has no {MANIFEST}.")
    step, listed = verified_manifest(text, target.address)
    found = target.files()
    for name, (size, tag) in listed.items():
        if name not in found:
            raise CheckpointError(f"checkpoint {target} is damaged: {name} is missing.")
        if found[name].size != size:
            raise CheckpointError(f"checkpoint {target} is damaged: {name} has {found[name].size} bytes, not {size}.")
        if found[name].tag != tag:
            raise CheckpointError(f"checkpoint {target} is damaged: the content of {name} has changed.")
    return Checkpoint(step, target.address, cache(partial(_fetched, target, scratch)))


def _fetched(target: ObjectBucket, scratch: Path) -> Path:
    """The driver's part, in a local folder."""
    folder = scratch / target.address.rpartition("/")[2]
    shutil.rmtree(folder, ignore_errors=True)
    for name in target.files():
        if "/" not in name and name != MANIFEST:
            target.download(name, folder / name)
    return folder


def _with(file: str, found: Iterable[str]) -> list[str]:
    """Names of checkpoints that have such an object, in order of their steps."""
    return [_top(path) for path in found if path == f"{_top(path)}/{file}" and _NAME.fullmatch(_top(path))]


def _remove_quietly(target: ObjectBucket) -> None:
    with contextlib.suppress(CheckpointError):  # the next start removes it (``clean``)
        target.remove(target.files())


def _top(path: str) -> str:
    return path.partition("/")[0]


def _step(name: str) -> int:
    return int(name.split("-")[1])
