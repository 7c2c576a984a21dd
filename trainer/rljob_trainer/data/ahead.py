"""Blocks of rows read before they are asked for, by a thread of their own.

The reader stays two blocks ahead, more when they are taken faster than that, across the ends of epochs: a step that
takes four blocks at once finds the next four ready if there was time to make them. While nobody asks for any yet, it
can go through a whole epoch (``read_through``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from rljob_trainer.aside import OneThread

T = TypeVar("T")

_MOST_BLOCKS = 16
"""Ahead of their use: enough for a large batch, little beside a data set."""


class ReadAhead(Generic[T]):
    """Rows in their order, one at a time: ``take`` of the place behind the last one is quick, any other starts anew.

    ``read(epoch, position)`` returns the block of ``block`` rows there (fewer at an epoch's end) and runs on the
    reader's thread. What it raises is raised by ``take``.
    """

    def __init__(
        self, read: Callable[[int, int], Sequence[T]], rows: int, block: int, epochs: int | None = None
    ) -> None:
        """``rows`` in each epoch; ``epochs`` None: without end."""
        self._read, self._rows, self._block, self._epochs = read, rows, block, epochs
        self._reader = OneThread("prompts")
        self._ready: deque[T] = deque()
        self._coming: deque[Future[Sequence[T]]] = deque()
        self._wanted = 2
        self._next = (-1, 0)
        """The place of the row that is at the front."""
        self._behind = (-1, 0)
        """The place behind the last block that was asked for."""

    def take(self, epoch: int, position: int) -> T:
        """The row at this place of this epoch."""
        if (epoch, position) != self._next:
            self._start_at(epoch, position)
        if not self._ready:
            self._fill()
        row = self._ready.popleft()
        self._next = self._following(epoch, position, 1)
        return row

    def read_through(self, epoch: int, position: int, useful: Callable[[], bool]) -> None:
        """Begins to read from this place to the epoch's end, for a ``read`` that keeps what it reads, and goes on while
        ``useful()``. Blocks that are asked for come in between. What cannot be read ends it; ``take`` says why."""

        def read_one() -> None:
            if useful():
                self._read(epoch, position)
                following, start = self._following(epoch, position, self._block)
                if following == epoch:
                    self.read_through(epoch, start, useful)

        self._reader.submit(read_one)

    def _fill(self) -> None:
        """Waits for the next block, and has more read."""
        if self._coming and not self._coming[0].done():
            # It is taken faster than it is read ahead.
            self._wanted = min(_MOST_BLOCKS, self._wanted + 1)
        while len(self._coming) <= self._wanted and (self._epochs is None or self._behind[0] < self._epochs):
            self._coming.append(self._reader.submit(self._read, *self._behind))
            self._behind = self._following(*self._behind, self._block)
        self._ready.extend(self._coming[0].result())
        self._coming.popleft()

    def _start_at(self, epoch: int, position: int) -> None:
        for block in self._coming:
            block.cancel()
        self._coming.clear()
        self._ready.clear()
        self._next = self._behind = (epoch, position)

    def _following(self, epoch: int, position: int, rows: int) -> tuple[int, int]:
        """The place so many rows later, but at most the first of the next epoch."""
        later = position + rows
        return (epoch, later) if later < self._rows else (epoch + 1, 0)
