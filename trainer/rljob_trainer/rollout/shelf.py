"""Where finished responses wait for the trainer, and interrupted ones for an engine: in files without a name, not in
the driver's memory.

Ten thousand groups of 16 responses of 8,192 tokens are 16 GB of ids, log-probs and versions; the driver needs them
twice: when the batch is laid out, and for a checkpoint. So each result's streams are written to a segment, a file that
is unlinked from the start, and become read-only views of its mapping. Nobody who holds them sees a difference. The
kernel takes their pages back when it wants to, a segment's disk space is free when its last view is gone, and a process
that is killed leaves nothing.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from rljob_trainer.episodes.requests import GenerationResult
from rljob_trainer.episodes.tokens import Tokens, as_constant, is_constant, says_of_prompt

Array = np.ndarray[Any, Any]

_REST_BYTES = 16 << 20
_log = logging.getLogger(__name__)


class Shelf:
    """Takes arrays out of memory. ``keep`` is for one thread, ``rest`` for any."""

    def __init__(self, folder: Path, *, segment_bytes: int = 256 << 20, least_bytes: int = 1024) -> None:
        """``folder`` lies on a local disk. Results below ``least_bytes`` stay in memory: a file would not pay."""
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._least = least_bytes
        self._file: IO[bytes] | None = None
        self._mapping: mmap.mmap | None = None
        self._bytes = np.empty(0, np.uint8)
        self._end = 0
        self._unrested = 0
        self._segments: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._changing = threading.Lock()
        self._told = False

    def keep(self, *results: GenerationResult) -> None:
        """Moves the tokens of results that came together, in place."""
        parts = [result.tokens for result in results]
        if len(parts) == 1 or any(map(says_of_prompt, parts)):
            moved = [self.put(part) for part in parts]
        else:
            moved = list(self.put(Tokens.joined(parts)).split(np.cumsum([0, *map(len, parts)]).tolist()))
        for result, tokens in zip(results, moved, strict=True):
            result.tokens = tokens

    def put(self, tokens: Tokens) -> Tokens:
        """Returns the same tokens, out of memory. On a disk that is full they stay in memory, and the log says so
        once."""
        # A constant is one object for all responses that have it, where a view is one for each.
        streams = {name: as_constant(stream) for name, stream in tokens.streams().items()}
        kept = {name: stream for name, stream in streams.items() if is_constant(stream)}
        moving = {name: stream for name, stream in streams.items() if name not in kept}
        return Tokens(**kept, **dict(zip(moving, self._put(list(moving.values())), strict=True)))

    def _put(self, arrays: Sequence[Array]) -> Sequence[Array]:
        size = sum(array.nbytes for array in arrays)
        if size < self._least:
            # Copies: what came from an engine together is one array, which a view would keep whole.
            return [array.copy() for array in arrays]
        try:
            views = self._write(arrays, size)
            self._told = False
            self._unrested += size
            if self._unrested >= _REST_BYTES:
                self.rest()
                self._unrested = 0
            return views
        except OSError as error:
            self._close_segment()
            if not self._told:
                _log.warning("responses stay in the driver's memory: cannot store them in %s (%s)", self._folder, error)
            self._told = True
            return arrays

    def rest(self) -> None:
        """Lets go of the pages that were read since, which count as this process's memory until then.

        ``keep`` does so too, now and then: what arrives is read once by those who make text of it.
        """
        with self._changing:
            segments = list(self._segments)
        for segment in segments:
            segment.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Views stay good."""
        self._close_segment()

    def _write(self, arrays: Sequence[Array], size: int) -> list[Array]:
        if self._mapping is None or self._end + size > len(self._mapping):
            self._open_segment(max(size, self._segment_bytes))
        assert self._file is not None
        assert self._mapping is not None
        # Not through the mapping: a full disk must be an error here, not a signal later.
        written = memoryview(b"".join([np.ascontiguousarray(array).data for array in arrays]))
        at = self._end
        while written:
            count = os.pwrite(self._file.fileno(), written, at)
            written, at = written[count:], at + count
        views = []
        for array in arrays:
            views.append(self._bytes[self._end : self._end + array.nbytes].view(array.dtype).reshape(array.shape))
            self._end += array.nbytes
        return views

    def _open_segment(self, size: int) -> None:
        self._close_segment()
        self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 -- closed with its segment
        os.ftruncate(self._file.fileno(), size)
        self._mapping = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ)
        # Views of one array share its base; one made of the buffer each time would weigh three times as much.
        self._bytes = np.frombuffer(self._mapping, np.uint8)
        with self._changing:
            self._segments.add(self._mapping)
        self._end = 0

    def _close_segment(self) -> None:
        if self._file is not None:
            self._file.close()  # the mapping holds the file for as long as there are views
        self._file = self._mapping = None
        self._bytes = np.empty(0, np.uint8)
