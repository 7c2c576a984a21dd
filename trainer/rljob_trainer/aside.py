"""Calls that may hang, made in threads that nobody has to wait for: those of a pool of ``concurrent.futures`` hold up
the end of the process for as long as a file server or a store does not answer."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_END_SECONDS = 2.0
"""For calls that are under way when the loop or the process ends: what hangs is left."""


async def aside(function: Callable[[], T]) -> T:
    """What ``function`` returns or raises. Unlike a thread of ``asyncio.to_thread``, one that hangs holds up neither
    the end of the event loop nor that of the process."""
    return await asyncio.wrap_future(_begun(function)[0])


class Threads(ThreadPoolExecutor):
    """For a loop's ``set_default_executor``: ``asyncio.to_thread`` then makes its calls as ``aside`` does, each in a
    thread of its own, and the loop's end waits a moment for them, but not for ever."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)  # which it never makes
        self._under_way: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        called, thread = _begun(lambda: fn(*args, **kwargs))
        self._under_way.add(thread)
        return called

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        until = time.monotonic() + (_END_SECONDS if wait else 0.0)
        for thread in list(self._under_way):
            thread.join(max(0.0, until - time.monotonic()))


class OneThread:
    """Calls made one after the other, in a thread of their own, as ``ThreadPoolExecutor(1)`` makes them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._calls.put, None).atexit = False
        _others.add(self)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        called: Future[T] = Future()
        self._calls.put(lambda: _call(called, lambda: function(*args, **kwargs)))
        if self._thread is None:
            arguments = (self._calls, self._turn)
            self._thread = threading.Thread(target=_serve, args=arguments, name=self._name, daemon=True)
            self._thread.start()
        return called

    def end(self, seconds: float) -> None:
        """Lets no further call begin, and waits for the one under way for so long."""
        self._turn.acquire(timeout=seconds)


_others: weakref.WeakSet[OneThread] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """A thread that came back from foreign code into an interpreter that is being taken down could crash it."""
    until = time.monotonic() + _END_SECONDS
    for thread in list(_others):
        thread.end(max(0.0, until - time.monotonic()))


def _serve(calls: SimpleQueue[Callable[[], None] | None], turn: threading.Lock) -> None:
    while (call := calls.get()) is not None:
        with turn:
            call()


def _begun(function: Callable[[], T]) -> tuple[Future[T], threading.Thread]:
    called: Future[T] = Future()
    thread = threading.Thread(target=_call, args=(called, function), name="aside", daemon=True)
    thread.start()
    return called, thread


def _call(called: Future[Any], function: Callable[[], Any]) -> None:
    if not called.set_running_or_notify_cancel():
        return
    try:
        called.set_result(function())
    except BaseException as error:  # noqa: BLE001  whoever waits is told
        called.set_exception(error)
