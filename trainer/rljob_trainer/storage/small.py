"""Small files that are read and replaced as a whole, wherever they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rljob_trainer.storage.bucket import ObjectBucket
from rljob_trainer.telemetry.run_folder import write_whole


class SmallFile(Protocol):
    """A reader sees the old content or the new one."""

    @property
    def place(self) -> str: ...

    def read(self) -> str | None:
        """None when there is none. Raises ``OSError`` and ``BucketError``."""

    def write(self, text: str) -> None:
        """Raises ``OutputError`` and ``BucketError``."""


class LocalFile:
    """A file of this machine or of a volume."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def place(self) -> str:
        return str(self._path)

    def read(self) -> str | None:
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return None

    def write(self, text: str) -> None:
        write_whole(self._path, text)


class BucketFile:
    """An object: a store replaces it in one step."""

    def __init__(self, bucket: ObjectBucket, name: str) -> None:
        self._bucket, self._name = bucket, name

    @property
    def place(self) -> str:
        return f"{self._bucket}/{self._name}"

    def read(self) -> str | None:
        data = self._bucket.read(self._name)
        return None if data is None else data.decode()

    def write(self, text: str) -> None:
        self._bucket.write(self._name, text.encode())
