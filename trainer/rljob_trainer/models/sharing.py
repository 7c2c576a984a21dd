"""Makes sure that the nodes of a cluster find the model's folder: on storage that all of them mount, or in a bucket."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

from rljob_trainer.errors import JobFileError
from rljob_trainer.models.folder import ModelFolder
from rljob_trainer.storage.bucket import ObjectBucket

_COPIED = "rljob_copied.json"
"""Beside a model's copy in a bucket, written last: what was copied."""
_LOOKED_AT = 1 << 20
"""Bytes of each end of a file that tell one model from another."""


def on_shared_storage(model: ModelFolder, storage: Path, target: Path | None) -> ModelFolder:
    """``model`` itself when all its files lie below ``storage``, else a copy of it in ``target``.

    ``target`` is a folder on that storage; None when the job has none: then a model that lies elsewhere raises
    ``JobFileError``.
    """
    if is_below(model, storage):
        return model
    if target is None:
        raise JobFileError(
            f"spec.model: the model is in {model.path}, which other nodes cannot read; put it into a volume and use "
            "pvc://claim/path, or set spec.checkpoint.uri to pvc://claim/path or s3://bucket/path, so that it can be "
            "copied there"
        )
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in _files(model.path):
        shutil.copyfile(path, partial / path.name)  # what a link leads to
    if target.is_symlink():
        target.unlink()
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return dataclasses.replace(model, path=target)


def is_below(model: ModelFolder, storage: Path) -> bool:
    """Whether all its files are on the storage that all nodes mount."""
    return all(path.resolve().is_relative_to(storage.resolve()) for path in _files(model.path))


def send_model(folder: Path, bucket: ObjectBucket) -> None:
    """Copies a model's folder into a bucket, unless it is there. Raises ``BucketError``."""
    files = _files(folder)
    record = json.dumps({path.name: _told_apart(path) for path in files}, sort_keys=True, indent=1).encode()
    if bucket.read(_COPIED) == record:
        return
    bucket.remove(bucket.files())
    for path in files:
        bucket.upload(path, path.name)
    bucket.write(_COPIED, record)


def fetch_model(folder: Path, address: str) -> None:
    """On a node that may not have the model's folder: takes it from where ``send_model`` has put it.

    Processes of one node wait for each other. Raises ``BucketError`` and ``JobFileError``.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return
        bucket = ObjectBucket(address)
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if bucket.read(_COPIED) is None:
            raise JobFileError(f"there is no complete model in {address}; it may have been removed during the run")
        for name in bucket.files():
            bucket.download(name, partial / name)
        partial.rename(folder)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _told_apart(file: Path) -> list[object]:
    """Size and digest of both ends: enough to tell one model's file from another's without reading all of it."""
    size = file.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        digest.update(stream.read(_LOOKED_AT))
        stream.seek(max(0, size - _LOOKED_AT))
        digest.update(stream.read(_LOOKED_AT))
    return [size, digest.hexdigest()]
