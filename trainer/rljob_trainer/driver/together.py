"""Parts that start at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(*starts: Coroutine[Any, Any, Any]) -> list[Any]:
    """Awaits all, and returns what they return, in order.

    Raises what the first of them raises that fails, after the others were cancelled and have ended: each has to undo
    what it has begun.
    """
    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(start) for start in starts]
    except BaseExceptionGroup as failures:
        failed = failures.exceptions[0]
    if failed is not None:
        raise failed  # not where the group is handled: it would take the place of what the error was raised from
    return [task.result() for task in tasks]
