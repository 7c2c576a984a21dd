"""Checkpoints as folders that are either whole or not there.

A checkpoint is written into a hidden folder, every file is flushed to the disk and listed with its size and digest in
``manifest.json``, and only then the folder gets its name by one rename. Reading verifies the manifest; a folder that
fails is reported and the one before it is used.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
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
    unreadable,
    verified_manifest,
)
from rljob_trainer.errors import CheckpointError, UnsavedError

_log = logging.getLogger(__name__)
_CHUNK = 1 << 22
_NAME = re.compile(r"step-([0-9]{8})")
_ASIDE = re.compile(r"aside-([0-9]+)-step-[0-9]{8}")
_NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What a damaged checkpoint may cause; any other ``OSError`` says nothing about it."""


class FolderCheckpoints:
    """``Checkpoints`` in a folder that all writers can see."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self._failed: list[Path] = []
        """Hidden folders of writes that failed."""

    @property
    def place(self) -> str:
        return str(self.folder)

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
        final = self.folder / name_of(step)
        # Another attempt may be writing too, until it finds that it is fenced.
        committing = False
        writing = self.folder / f".writing-{name_of(step)}-{uuid.uuid4().hex[:8]}"
        try:
            await asyncio.to_thread((writing / LEARNER).mkdir, parents=True)
            await save_learner(str(writing / LEARNER))
            await asyncio.to_thread((writing / DRIVER).write_text, json.dumps(driver_state))
            if save_rest is not None:
                await save_rest(writing)
            await asyncio.to_thread(_seal, writing, step)
            committing = True
            await asyncio.to_thread(self._commit, writing, final, may_commit)
        except BaseException as error:
            # What is left of it would take the space that the next one needs. (Who is cancelled leaves a thread behind
            # that may be giving it its name: then it has to be whole.)
            if not (committing and isinstance(error, asyncio.CancelledError)):
                await asyncio.to_thread(shutil.rmtree, writing, ignore_errors=True)
            self._failed.append(writing)
            if isinstance(error, OSError):
                raise UnsavedError(
                    f"cannot write the checkpoint of step {step} to {self.folder}: {error.strerror or error}. "
                    "Free some space or choose another folder; earlier checkpoints are untouched."
                ) from error
            raise
        await asyncio.to_thread(self._remove_old)
        return _checkpoint(step, final)

    def _commit(self, writing: Path, final: Path, may_commit: Callable[[], None]) -> None:
        may_commit()
        if final.exists():  # the same step again, after a resume from an earlier one
            shutil.rmtree(final)
        writing.rename(final)
        _sync_folder(self.folder)

    def steps(self) -> list[int]:
        return sorted(_step(path) for path in self._folders())

    def open(self, step: int) -> Checkpoint:
        return open_folder(self.folder / name_of(step))

    def clean(self) -> None:
        for leftover in self.folder.glob(".writing-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def clean_own(self) -> None:
        while self._failed:
            shutil.rmtree(self._failed.pop(), ignore_errors=True)

    def discard_after(self, step: int) -> list[str]:
        later = [path for path in self._folders() if _step(path) > step]
        aside = self._aside()
        number = 1 + (int(_ASIDE.fullmatch(aside[-1].name)[1]) if aside else 0)  # type: ignore[index]
        try:
            return [str(p.rename(self.folder / f"aside-{n}-{p.name}")) for n, p in enumerate(later, number)]
        except OSError as error:
            raise UnsavedError(
                f"cannot set aside {error.filename}: {error.strerror or error}. Move the checkpoints after step {step} "
                f"out of {self.folder}, or make it writable"
            ) from error

    def _folders(self) -> list[Path]:
        return sorted(self.folder / name for name in self._names() if _NAME.fullmatch(name))

    def _aside(self) -> list[Path]:
        """What was set aside, in the order in which it was."""
        found = {int(match[1]): name for name in self._names() if (match := _ASIDE.fullmatch(name))}
        return [self.folder / found[number] for number in sorted(found)]

    def _names(self) -> list[str]:
        """Raises ``UnreadableError``: a folder that cannot be listed is not an empty one."""
        try:
            return os.listdir(self.folder)
        except _NOT_THERE:
            return []
        except OSError as error:
            raise unreadable(self.folder, error) from error

    def _remove_old(self) -> None:
        """What cannot be removed is said, and no reason to end: the new checkpoint is whole. Renamed first: half of an
        old one would be taken for a damaged one."""
        for path in (*self._folders()[: -self.keep], *self._aside()[: -self.keep]):
            removed = self.folder / f".writing-{path.name}-{uuid.uuid4().hex[:8]}"
            try:
                path.rename(removed)
            except OSError as error:
                _log.warning("cannot remove %s: %s; it stays and takes up space", path, error.strerror or error)
                continue
            shutil.rmtree(removed, ignore_errors=True)
            if removed.exists():  # somebody reads in it, over NFS; tried again later
                self._failed.append(removed)


def open_folder(path: Path) -> Checkpoint:
    """Verifies the folder against its manifest.

    Raises ``CheckpointError`` naming the file that is wrong, and ``UnreadableError`` naming one that cannot be read.
    """
    file = path / MANIFEST
    try:
        try:
            text = file.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MANIFEST}.") from None
        except _NOT_THERE as error:
            raise CheckpointError(f"checkpoint {path} has an unreadable {MANIFEST}: {error}.") from error
        step, listed = verified_manifest(text, str(path))
        for name, (size, digest) in listed.items():
            file = path / name
            try:
                found = file.stat().st_size
                if found != size:
                    raise CheckpointError(f"checkpoint {path} is damaged: {name} has {found} bytes, not {size}.")
                if _digest(file) != digest:
                    raise CheckpointError(f"checkpoint {path} is damaged: the content of {name} has changed.")
            except _NOT_THERE:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing.") from None
    except OSError as error:
        raise unreadable(file, error) from error
    return _checkpoint(step, path)


def _checkpoint(step: int, path: Path) -> Checkpoint:
    return Checkpoint(step, str(path), lambda: path)


def _seal(folder: Path, step: int) -> None:
    files: dict[str, list[object]] = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())
        files[str(file.relative_to(folder))] = [file.stat().st_size, _digest(file)]
    with (folder / MANIFEST).open("w") as stream:
        stream.write(manifest(step, files))
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(folder)


def _digest(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
