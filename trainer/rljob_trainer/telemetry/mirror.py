"""A text stream whose lines appear in several places: a Ray job's own output is not what `kubectl logs` shows."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rljob_trainer.telemetry.run_folder import writing


class MirroredStream(io.TextIOBase):
    """Writes to ``stream`` and, as far as that is possible without waiting, to files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._files: list[int] = []

    def mirror_to(self, path: Path) -> None:
        """From now on also to ``path``, which may be a pipe. One that cannot be opened is left out with a word."""
        try:
            # Not waiting for a reader that has stopped reading: training matters more than its log.
            self._files.append(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644))
        except OSError as error:
            self._stream.write(f"log lines are not mirrored to {path}: {error.strerror}\n")

    def also(self, path: Path) -> None:
        """From now on also to the file ``path``, whose folder is made. Raises ``OutputError``."""
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files.append(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644))

    def write(self, text: str) -> int:
        self._stream.write(text)
        self.only_mirror(text)
        return len(text)

    def only_mirror(self, text: str) -> None:
        """Leaves ``stream`` out."""
        for file in self._files:
            with suppress(OSError):  # a full pipe or disk: the line is lost here, not elsewhere
                os.write(file, text.encode(errors="replace"))

    def flush(self) -> None:
        self._stream.flush()

    def writable(self) -> bool:
        return True

    def close_files(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()


@contextmanager
def mirrored(stream: TextIO, path: Path | None) -> Iterator[MirroredStream]:
    """``stream``, mirrored to ``path`` if there is one."""
    mirror = MirroredStream(stream)
    if path is not None:
        mirror.mirror_to(path)
    try:
        yield mirror
    finally:
        mirror.close_files()
