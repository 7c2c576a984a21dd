"""Calls that may hang, made in threads that nobody has to wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def aside(function: Callable[[], T]) -> T:
    """What ``function`` returns or raises. Unlike a thread of ``asyncio.to_thread``, one that hangs holds up neither
    the end of the event loop nor that of the process."""
    called: Future[T] = Future()

    def call() -> None:
        if not called.set_running_or_notify_cancel():
            return
        try:
            called.set_result(function())
        except BaseException as error:  # noqa: BLE001  whoever waits is told
            called.set_exception(error)

    threading.Thread(target=call, name="aside", daemon=True).start()
    return await asyncio.wrap_future(called)
