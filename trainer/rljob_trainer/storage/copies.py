"""The files of a run that works here and is kept in a bucket."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from rljob_trainer.storage.bucket import ObjectBucket


class Copies:
    """Copies of the files in ``folder``; ``own`` are names of files and folders that are somebody else's business,
    also where an earlier run was set aside."""

    def __init__(self, folder: Path, bucket: ObjectBucket, own: tuple[str, ...]) -> None:
        self._folder, self._bucket, self._own = folder, bucket, own
        self._seen: dict[str, tuple[int, int]] = {}
        """Size and time of change (ns) of the files as they are in the bucket."""
        self._busy = threading.Lock()

    def bring(self) -> None:
        """All files from the bucket, over those that are here. Raises ``BucketError``."""
        with self._busy:
            for name in self._bucket.files():
                if self._is_ours(name):
                    self._bucket.download(name, self._folder / name)
                    self._seen[name] = _state(self._folder / name)

    def send(self) -> None:
        """Files that have changed since they were sent last. Raises ``BucketError``; what was sent by then stays."""
        with self._busy:
            self._send()

    def send_all(self) -> None:
        """Sends what ``send`` does, and objects whose files are gone are removed."""
        with self._busy:
            self._send()
            gone = [name for name in self._bucket.files() if self._is_ours(name) and name not in self._seen]
            self._bucket.remove(gone)

    def _send(self) -> None:
        here = dict(self._files())
        self._seen = {name: state for name, state in self._seen.items() if name in here}
        for name, state in here.items():
            if self._seen.get(name) == state:
                continue
            try:
                self._bucket.upload(self._folder / name, name)
            except BaseException:
                if (self._folder / name).exists():
                    raise
                continue  # replaced or removed since it was listed
            self._seen[name] = state  # as it was before: what was added meanwhile is sent next time

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        # Unlike Path.rglob of Python 3.11 this passes over folders that are removed meanwhile.
        for place, folders, files in os.walk(self._folder):
            folders[:] = sorted(filter(self._is_ours, folders))
            for path in (Path(place, name) for name in sorted(files)):
                name = path.relative_to(self._folder).as_posix()
                if self._is_ours(name) and not path.is_symlink() and path.is_file():
                    try:
                        yield name, _state(path)
                    except FileNotFoundError:
                        continue

    def _is_ours(self, name: str) -> bool:
        return not any(part in self._own or part.startswith(".") for part in name.split("/"))


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
