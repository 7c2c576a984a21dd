"""A text stream whose failures stop nobody: a run goes on, and ends in order, when it cannot show anything any more.

The terminal was closed, the tee in `| tee log` got the Ctrl-C too, the disk under `> log` is full.
"""

from __future__ import annotations

import errno
import io
import os
from contextlib import suppress
from typing import TextIO

_GONE = (errno.EPIPE, errno.EIO)
"""The reader has ended; the terminal was closed."""


class SteadyStream(io.TextIOBase):
    """Writes to ``stream`` what that takes, and drops the rest."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._failed(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if error.errno in _GONE:
            # For good. What is still buffered would make Python complain at exit, and end with code 120.
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
