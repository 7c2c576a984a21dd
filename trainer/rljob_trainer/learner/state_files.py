"""Where a learner's state is read and written: how torch and we reach the files of a folder or of a bucket."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from rljob_trainer.storage import is_address
from rljob_trainer.storage.bucket import FRESH, ObjectBucket


class StateFiles(Protocol):
    """Tensors through torch, small files by name."""

    def writer(self) -> StorageWriter:
        """Raises ``OSError`` for a folder that is not there."""

    def reader(self) -> StorageReader: ...

    def write(self, name: str, data: bytes) -> None:
        """Raises ``OSError`` and ``BucketError``."""

    def read(self, name: str) -> bytes | None:
        """None when there is none. Raises ``OSError`` and ``BucketError``."""


def state_files(place: str | Path) -> StateFiles:
    return _BucketFiles(ObjectBucket(str(place))) if is_address(place) else _FolderFiles(Path(place))


class _FolderFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def writer(self) -> StorageWriter:
        if not self._folder.is_dir():
            # Given up by whoever made it, or removed by an attempt that has taken over; torch would make it anew.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._folder))
        return FileSystemWriter(self._folder)

    def reader(self) -> StorageReader:
        return FileSystemReader(self._folder)

    def write(self, name: str, data: bytes) -> None:
        (self._folder / name).write_bytes(data)

    def read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None


class _Objects(FileSystem):
    """torch's view of a store."""

    def mkdir(self, path: object) -> None:
        """A store has no folders to be made; s3fs would make the bucket, or ask for the right to."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if "r" in mode:
                # torch then reads each tensor from its beginning to its end. In a stream where it may seek it goes to a
                # tensor's end first and back again, and s3fs fetches the bytes before the end twice.
                stream.seekable = lambda: False  # type: ignore[method-assign]
            yield stream


class _BucketFiles:
    def __init__(self, bucket: ObjectBucket) -> None:
        self._bucket = bucket

    def writer(self) -> StorageWriter:
        # One thread: errors in torch's other threads are lost, and the shard with them (torch 2.13). s3fs sends the
        # parts of one file side by side. What is no local file is "synchronised" by os.sync, which waits for every
        # disk of the node.
        writer = FsspecWriter(self._bucket.address, sync_files=False, thread_count=1, **FRESH)
        writer.fs = self._objects()
        return writer

    def reader(self) -> StorageReader:
        reader = FsspecReader(self._bucket.address, **FRESH)
        reader.fs = self._objects()
        return reader

    def _objects(self) -> Any:
        objects = _Objects()
        objects.init_path(self._bucket.address, **FRESH)
        return objects

    def write(self, name: str, data: bytes) -> None:
        self._bucket.write(name, data)

    def read(self, name: str) -> bytes | None:
        return self._bucket.read(name)
