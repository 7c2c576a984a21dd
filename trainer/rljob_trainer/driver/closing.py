"""What is closed at the end of a run, of which the first error is the one that is told.

A disk that is full makes much fail, one after the other: what ended the run is its cause, and what could not be closed
afterwards is said beside it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType

from rljob_trainer.record.fence import Fence
from rljob_trainer.record.ledger import Ledger

_log = logging.getLogger(__name__)

Exit = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], Awaitable[None]]
"""For ``AsyncExitStack.push_async_exit``."""


def closing(close: Callable[[], object]) -> Exit:
    """Calls ``close``, which may block, in a thread. Raises what that raises, unless something was raised before."""
    return _quietly_after_another(lambda: asyncio.to_thread(close))


def closing_ledger(ledger: Ledger, fence: Fence) -> Exit:
    """Like ``closing``, for a ledger, into which nothing is written when the run is another's by now."""
    return _quietly_after_another(lambda: ledger.close(write=not fence.lost))


def _quietly_after_another(close: Callable[[], Awaitable[object]]) -> Exit:
    async def leave(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await close()
        except Exception as problem:  # the one before is raised on
            if error is None:
                raise
            _log.error("%s", problem)

    return leave
