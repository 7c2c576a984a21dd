"""Calls that may hang, made in threads that nobody has to wait for.

Python waits for the threads of its executors when an event loop ends, and once more when the process does, however long
that takes: a file server that does not answer would keep a run that has said so from ending. The threads here get some
seconds for what they are at, and then end with the process.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

P = ParamSpec("P")
T = TypeVar("T")

_LAST_SECONDS = 3.0
"""What threads get at the end of an event loop or of the process: longer than anything takes that does not hang."""


async def aside(function: Callable[[], T]) -> T:
    """What ``function`` returns or raises. A thread that hangs holds up neither the end of the event loop nor that of
    the process."""
    called: Future[T] = Future()
    _begin(called, function)
    return await asyncio.wrap_future(called)


class Threads(ThreadPoolExecutor):
    """For ``asyncio.to_thread``, as an event loop's default executor: a thread for each call, and none that holds up
    the end for long."""

    def __init__(self) -> None:
        super().__init__(1)  # whose threads are never started
        self._open: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        called: Future[T] = Future()
        self._open.add(called)
        called.add_done_callback(self._open.discard)
        _begin(called, partial(fn, *args, **kwargs))
        return called

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if wait:
            futures.wait(set(self._open), _LAST_SECONDS)


class InOrder:
    """One call after the other, in a thread that is there while there is something to call."""

    def __init__(self, name: str) -> None:
        """``name``: of the thread."""
        self._name = name
        self._waiting: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        _in_order.add(self)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Calls ``function`` when those that were submitted before it have ended."""
        called: Future[T] = Future()
        with self._lock:
            if self._closed:
                called.cancel()
                return called
            self._waiting.append(partial(_call, called, partial(function, *args, **kwargs)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
        return called

    def close(self, seconds: float) -> None:
        """Begins no further call, and waits for the one under way for so many ``seconds`` at most."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                call = self._waiting.popleft()
            call()
            del call  # with what it holds, while the next one is waited for


_in_order: WeakSet[InOrder] = WeakSet()


@atexit.register
def _end() -> None:
    until = time.monotonic() + _LAST_SECONDS
    for calls in list(_in_order):
        calls.close(max(0.0, until - time.monotonic()))


def _begin(called: Future[T], function: Callable[[], T]) -> None:
    threading.Thread(target=_call, args=(called, function), name="aside", daemon=True).start()


def _call(called: Future[T], function: Callable[[], T]) -> None:
    if not called.set_running_or_notify_cancel():
        return
    try:
        called.set_result(function())
    except BaseException as error:  # noqa: BLE001  whoever waits is told
        called.set_exception(error)
