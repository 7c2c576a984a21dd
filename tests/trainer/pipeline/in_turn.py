"""A virtual engine without any chance in it, and a pool that has it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from virtual_engine import VirtualEngine

from rljob_trainer.episodes.requests import GenerationRequest, SamplingSettings
from rljob_trainer.pools.pool import RolloutPool

LONG = SamplingSettings(max_tokens=1_000_000)


class InTurn(VirtualEngine):
    """One request after the other, each so many ``seconds``; from ``sticks_after`` finished ones on none ends."""

    def __init__(self, name: str, sticks_after: int = 1_000_000, seconds: float = 100.0) -> None:
        super().__init__(name, random.Random(0), 1.0, 0, 0.0)
        self._free_at, self._left, self._seconds = 0.0, sticks_after, seconds

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        super()._submit(requests)
        loop = asyncio.get_running_loop()
        for request in requests:
            self._timers[request.id].cancel()
            self._free_at = max(self._free_at, loop.time()) + (self._seconds if self._left > 0 else 1e9)
            self._left -= 1
            self._timers[request.id] = loop.call_at(self._free_at, self._end, request.id)


def pool_with(engine: VirtualEngine) -> RolloutPool:
    pool = RolloutPool()
    pool.add(engine)
    pool.activate([engine.name])
    return pool
