"""SIGINT, SIGTERM, SIGHUP and the operator's suspend as a wish to stop, which the run fulfils at the next safe point.

The first signal asks; a second one within the grace period ends the process at once (the last checkpoint remains),
unless it comes so soon after the first that nobody can have meant it. A closed terminal (SIGHUP) only ever asks: shells
and the system send it one after the other.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SAME_WISH_SECONDS = 0.5
"""A signal so soon after the first is the same wish. ``timeout`` signals the process and then its group, and what
passes Ctrl-C on (``uv run``, for one) does so beside the terminal, which has sent it already."""


class StopRequest:
    """Set once somebody has asked the run to stop."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.signal: signal.Signals | None = None
        self._signalled = 0.0
        """When the first signal came, by ``time.monotonic``."""
        self.suspended = False
        """Whether the operator asked, which can wait for an update that is under way."""

    def listen(self) -> None:
        """Takes the signals from whoever handles them now: Ray, for one, installs a handler that ends the process."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # the user said nohup
            loop.add_signal_handler(number, self.ask, number)

    def ask(self, number: int) -> None:
        """What a signal does."""
        if self.signal is not None:
            if number == signal.SIGHUP or time.monotonic() - self._signalled < SAME_WISH_SECONDS:
                return
            os._exit(128 + number)
        self._signalled = time.monotonic()
        self.signal = signal.Signals(number)
        self.suspended = False
        self.asked.set()

    def suspend(self) -> None:
        """What the operator's command does; more than once is the same as once."""
        if not self.asked.is_set():
            self.suspended = True
            self.asked.set()

    @property
    def sentence(self) -> str:
        """Who asked."""
        return "suspended" if self.suspended else self.signal.name if self.signal else "stopped on request"

    def __bool__(self) -> bool:
        return self.asked.is_set()


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Inside, signals set the request instead of ending the process."""
    request = StopRequest()
    request.listen()
    try:
        yield request
    finally:
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)
