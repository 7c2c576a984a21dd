"""How long an agent has been at work by itself: time in which it waits for the model is not its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class OwnTime:
    """A stopwatch that stands still while the model is asked. From within an event loop."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: how long until ``is_up``. It runs."""
        self._loop = asyncio.get_running_loop()
        self._left = seconds
        self._waiting = 0
        self._since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.is_up: asyncio.Future[None] = self._loop.create_future()
        """Done when the time is used up."""
        self._go_on()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside, the model is asked, perhaps several things at once."""
        self._waiting += 1
        if self._waiting == 1:
            self._left -= self._loop.time() - self._since
            self.stop()
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                self._go_on()

    def stop(self) -> None:
        """Ends the count: its end is not waited for any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _go_on(self) -> None:
        self._since = self._loop.time()
        self._timer = self._loop.call_later(max(0.0, self._left), self._end)

    def _end(self) -> None:
        if not self.is_up.done():
            self.is_up.set_result(None)
