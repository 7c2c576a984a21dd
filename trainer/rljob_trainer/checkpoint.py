"""Checkpoints as folders that are either whole or not there.

A checkpoint is written into a hidden folder, every file is flushed to the disk and listed with its size and digest in
``manifest.json``, and only then the folder gets its name by one rename. Reading verifies the manifest; a folder that
fails is reported and the one before it is used. What is inside is the business of those who write it.

    checkpoints/
      step-00000020/
        manifest.json     format, step, files with size and digest
        driver.json       feed position, KL controller, totals, open groups
        groups.npz        tokens of groups that are begun and not trained
        ledger.sqlite     what became of every prompt
        learner/          sharded model, optimizer, scheduler and random states
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rljob_trainer.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint folder."""

    step: int
    path: Path

    def driver_state(self) -> dict[str, object]:
        """The driver's part, as it was given to ``write``."""
        state: dict[str, object] = json.loads((self.path / "driver.json").read_text())
        return state

    @property
    def learner(self) -> Path:
        return self.path / "learner"


class CheckpointStore:
    """The checkpoints of one run.

    Usage::

        store = CheckpointStore(output / "checkpoints", keep=3)
        await store.write(step, driver_state, save_learner=learner.save)
        latest = store.latest(report=view.message)
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    async def write(
        self,
        step: int,
        driver_state: dict[str, object],
        save_learner: Callable[[Path], Awaitable[None]],
        save_rest: Callable[[Path], Awaitable[None]] | None = None,
        may_commit: Callable[[], None] = lambda: None,
    ) -> Checkpoint:
        """Writes the checkpoint of ``step`` and removes those beyond ``keep``.

        ``save_rest`` adds files of its own. ``may_commit`` raises when another process has taken the folder over.
        Raises ``CheckpointError`` when it cannot be written; earlier checkpoints are untouched then.
        """
        final = self.folder / _name(step)
        # Another attempt may be writing too, until it finds that it is fenced.
        writing = self.folder / f".writing-{_name(step)}-{uuid.uuid4().hex[:8]}"
        try:
            (writing / "learner").mkdir(parents=True)
            await save_learner(writing / "learner")
            (writing / "driver.json").write_text(json.dumps(driver_state))
            if save_rest is not None:
                await save_rest(writing)
            await asyncio.to_thread(_seal, writing, step)
            may_commit()
            if final.exists():  # the same step again, after a resume from an earlier one
                shutil.rmtree(final)
            writing.rename(final)
            _sync_folder(self.folder)
        except BaseException as error:
            # What is left of it would take the space that the next one needs.
            shutil.rmtree(writing, ignore_errors=True)
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"cannot write the checkpoint of step {step} into {self.folder}: {error.strerror or error}. "
                    "Free some space or choose another folder; earlier checkpoints are untouched."
                ) from error
            raise
        self._remove_old()
        return Checkpoint(step, final)

    def latest(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that verifies, or None. Each broken one is told to ``report``."""
        for path in reversed(self._folders()):
            try:
                return open_checkpoint(path)
            except CheckpointError as error:
                report(f"{error} Trying the checkpoint before it.")
        return None

    def clean(self) -> None:
        """Removes what an interrupted write has left."""
        for leftover in self.folder.glob(".writing-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def discard_after(self, step: int) -> None:
        """Removes checkpoints of later steps: those of a run that is being rolled back."""
        for path in self._folders():
            if _step(path) > step:
                shutil.rmtree(path)

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob("step-????????"))

    def _remove_old(self) -> None:
        for path in self._folders()[: -self.keep]:
            shutil.rmtree(path)


def open_checkpoint(path: Path) -> Checkpoint:
    """Verifies the folder against its manifest. Raises ``CheckpointError`` naming the file that is wrong."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        listed: dict[str, list[object]] = manifest["files"]
        step = int(manifest["step"])
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {manifest['format']}; this version reads {FORMAT}.")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a whole checkpoint: it has no {MANIFEST}.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} has an unreadable {MANIFEST}: {error}.") from error
    for name, (size, digest) in listed.items():
        file = path / name
        if not file.exists():
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing.")
        if file.stat().st_size != size:
            raise CheckpointError(f"checkpoint {path} is damaged: {name} has {file.stat().st_size} bytes, not {size}.")
        if _digest(file) != digest:
            raise CheckpointError(f"checkpoint {path} is damaged: the content of {name} has changed.")
    return Checkpoint(step, path)


def _seal(folder: Path, step: int) -> None:
    files: dict[str, list[object]] = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())
        files[str(file.relative_to(folder))] = [file.stat().st_size, _digest(file)]
    manifest = folder / MANIFEST
    with manifest.open("w") as stream:
        json.dump({"format": FORMAT, "step": step, "files": files}, stream, indent=1)
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


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
