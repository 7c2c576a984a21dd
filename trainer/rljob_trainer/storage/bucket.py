"""A folder in an object store, through fsspec."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_trainer.errors import BucketError, UnreachableError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

REMEDY = "check the address, the network and the credentials in the environment (on a cluster, in the pods)"
_REFUSALS = (errno.EINVAL, errno.EPERM, errno.ENOSYS)
"""What s3fs makes of a request that S3 takes for wrong."""
FRESH: dict[str, Any] = {"use_listings_cache": False}
"""Options of every fsspec file system here: other processes write into the same bucket."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a listing says of one object."""

    size: int
    tag: str
    """Changes with the content (an ETag); empty where the store has none."""


class ObjectBucket:
    """Objects below one address, by their names relative to it.

    Every method raises ``BucketError``, whatever the store's client raises, and ``UnreachableError`` for what another
    try may help against.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._opened: tuple[AbstractFileSystem, str] | None = None

    def below(self, name: str) -> ObjectBucket:
        return ObjectBucket(f"{self.address}/{name}")

    def read(self, name: str) -> bytes | None:
        """A small object; None when there is none."""
        with self._telling(f"cannot read {name}"):
            store, root = self._store()
            try:
                data: bytes = store.cat_file(f"{root}/{name}")
            except FileNotFoundError:
                return None
            return data

    def write(self, name: str, data: bytes) -> None:
        """A small object, whole or not at all."""
        with self._telling(f"cannot write {name}"):
            store, root = self._store()
            store.pipe_file(f"{root}/{name}", data)

    def upload(self, file: Path, name: str) -> None:
        with self._telling(f"cannot write {name}"):
            store, root = self._store()
            store.put_file(str(file), f"{root}/{name}")

    def download(self, name: str, file: Path) -> None:
        """``file``'s folder is made."""
        with self._telling(f"cannot read {name}"):
            store, root = self._store()
            file.parent.mkdir(parents=True, exist_ok=True)
            store.get_file(f"{root}/{name}", str(file))

    def files(self) -> dict[str, StoredObject]:
        """All objects, by name in order; empty where nothing is. The bucket itself must exist."""
        with self._telling("cannot list objects"):
            store, root = self._store()
            found = store.find(root, detail=True)
            return {
                name.removeprefix(f"{root}/"): StoredObject(int(entry["size"]), str(entry.get("ETag") or ""))
                for name, entry in sorted(found.items())
                if entry["type"] == "file" and name.startswith(f"{root}/")
            }

    def move(self, names: Iterable[str], to: ObjectBucket) -> None:
        """Without the data passing through here."""
        with self._telling(f"cannot move objects to {to}"):
            store, root = self._store()
            _, target = to._store()
            if names := list(names):
                store.copy([f"{root}/{name}" for name in names], [f"{target}/{name}" for name in names])
                store.rm([f"{root}/{name}" for name in names])

    def remove(self, names: Iterable[str]) -> None:
        """Objects that are gone already don't matter."""
        with self._telling("cannot remove objects"):
            store, root = self._store()
            if paths := [f"{root}/{name}" for name in names]:
                store.rm(paths)

    def _store(self) -> tuple[AbstractFileSystem, str]:
        if self._opened is None:
            import fsspec

            store, root = fsspec.url_to_fs(self.address, **FRESH)
            self._opened = store, root.rstrip("/")
        return self._opened

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            kind = BucketError if refused(error) else UnreachableError
            raise kind(f"{self.address}: {what}: {reason(error)}; {REMEDY}") from error

    def __str__(self) -> str:
        return self.address


def refused(error: BaseException) -> bool:
    """Whether a store, or its client, has said no: to the address, the credentials or the request, which will be the
    same the next time. What else fails (no answer, a server that is busy or broken) may work then."""
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        return True
    return isinstance(error, FileNotFoundError | PermissionError | ImportError | ValueError)


def reason(error: BaseException) -> str:
    """One line: what a store's client says, which may be nothing but the class's name."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
