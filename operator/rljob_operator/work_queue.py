"""A queue of keys, each worked on by one worker at a time: after a change, when due, after errors with growing pauses.

Knows nothing about Kubernetes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
FIRST_PAUSE = 0.5
SHORT_PAUSE = 0.05
LONGEST_PAUSE = 60.0


class RetryError(Exception):
    """The work on a key could not be finished and should be tried again; not worth a stack trace.

    Attributes:
        soon: nothing is out of order and the same work may well succeed in a moment. The pauses begin with a tenth of
            the usual one, and grow like it.
    """

    def __init__(self, message: str, *, soon: bool = False) -> None:
        super().__init__(message)
        self.soon = soon


class WorkQueue(Generic[K]):
    """Runs `work(key)` for every added key. It returns after how many seconds the key is due again, or None.

    A key that is added while it is worked on is worked on once more afterwards: no change is lost, and a hundred
    changes cost one look.
    """

    def __init__(self, work: Callable[[K], Awaitable[float | None]], *, workers: int = 16) -> None:
        self._work = work
        self._workers = workers
        self._ready: asyncio.Queue[K] = asyncio.Queue()
        self._queued: dict[K, float] = {}
        """Keys in `_ready`, and since when."""
        self._active: set[K] = set()
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self.on_error: Callable[[K, BaseException], None] = lambda _key, _error: None

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def longest_wait(self) -> float:
        """Seconds that the oldest key has been waiting."""
        return time.monotonic() - min(self._queued.values(), default=time.monotonic())

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is worked on; timers may be pending."""
        return not self._queued and not self._active

    def add(self, key: K) -> None:
        """The key is due now."""
        self._cancel(key)
        if key in self._active:
            self._again.add(key)
        elif key not in self._queued:
            self._queued[key] = time.monotonic()
            self._ready.put_nowait(key)

    def add_later(self, key: K, seconds: float) -> None:
        """The key is due in some seconds, if it isn't before."""
        self._cancel(key)
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, self._due, key)

    def forget(self, key: K) -> None:
        """The key is gone for good."""
        self._cancel(key)
        self._failures.pop(key, None)
        self._again.discard(key)

    def relieve(self) -> None:
        """What was in the way of all keys has passed: the pauses after errors begin anew."""
        self._failures.clear()

    async def run(self) -> None:
        """Works until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._workers):
                    group.create_task(self._worker())
        finally:
            for timer in self._timers.values():
                timer.cancel()

    async def _worker(self) -> None:
        while True:
            key = await self._ready.get()
            self._queued.pop(key, None)
            self._active.add(key)
            try:
                later = await self._work(key)
            except Exception as error:  # noqa: BLE001 - one broken job must not stop the work on all the others
                self._failed(key, error)
            else:
                self._failures.pop(key, None)
                if later is not None and key not in self._again:
                    self.add_later(key, later)
            finally:
                self._active.discard(key)
                if key in self._again:
                    self._again.discard(key)
                    self.add(key)

    def _failed(self, key: K, error: Exception) -> None:
        failures = self._failures.get(key, 0) + 1
        self._failures[key] = failures
        # Spread out, so that a thousand keys that failed together don't come back together.
        first = SHORT_PAUSE if isinstance(error, RetryError) and error.soon else FIRST_PAUSE
        pause = min(LONGEST_PAUSE, first * 2 ** min(failures - 1, 10)) * random.uniform(0.75, 1.25)
        self.on_error(key, error)
        if isinstance(error, RetryError):
            log.info("%s: %s; again in %.1f s", key, error, pause)
        else:
            log.error("%s: failed; again in %.1f s", key, pause, exc_info=error)
        self.add_later(key, pause)
        # A change that came meanwhile doesn't shorten the pause: it would turn an outage into a storm.
        self._again.discard(key)

    def _due(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _cancel(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
