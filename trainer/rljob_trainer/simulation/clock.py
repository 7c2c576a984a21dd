"""An event loop whose clock jumps: coroutines that only sleep run in the order of their times, without waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Every task waits for another one: no timer is set and nothing is ready."""


class _JumpingSelector(selectors.SelectSelector):
    """Where the real one would sleep until the next timer, moves the clock there."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("nothing is scheduled and nothing is ready")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its ``time()`` starts at 0 and counts virtual seconds. It does no input or output and starts no threads."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        # Far below any time that is simulated, far above what rounding loses at large times.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs ``main`` to its end in virtual time. Raises ``DeadlockError`` when it can never end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
