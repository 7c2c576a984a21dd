"""How much a judge may be asked: in any minute, requests and tokens, first come, first served; in the whole run, tokens
before they are counted."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

MINUTE = 60.0


class Spent:
    """A request that was begun, with the tokens it is taken to have."""

    def __init__(self, begun: float, tokens: int) -> None:
        self.begun = begun
        self.tokens = tokens

    def counted(self, tokens: int) -> None:
        """The endpoint says how many there were."""
        self.tokens = tokens


class MinuteLimits:
    """At most ``requests`` begun, and ``tokens``, in any 60 seconds (None: no limit)."""

    def __init__(
        self,
        requests: int | None,
        tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._requests, self._tokens = requests, tokens
        self._clock, self._sleep = clock, sleep
        self._spent: deque[Spent] = deque()
        self._turn = asyncio.Lock()
        self._held_until = 0.0
        self.waiting = 0
        """Who is held back."""

    def hold(self, seconds: float) -> None:
        """Lets no request begin before so many seconds have passed: the endpoint has said so."""
        self._held_until = max(self._held_until, self._clock() + seconds)

    async def begin(self, tokens: int) -> Spent:
        """Waits until a request of about so many tokens may begin. One that is larger than the limit begins when
        nothing else was spent for a minute."""
        self.waiting += 1
        try:
            async with self._turn:
                while (seconds := self._seconds_until(tokens)) > 0:
                    await self._sleep(seconds)
                spent = Spent(self._clock(), tokens)
                if self._requests is not None or self._tokens is not None:
                    self._spent.append(spent)
                return spent
        finally:
            self.waiting -= 1

    def _seconds_until(self, tokens: int) -> float:
        now = self._clock()
        while self._spent and self._spent[0].begun <= now - MINUTE:
            self._spent.popleft()
        due = self._held_until
        if self._requests is not None and len(self._spent) >= self._requests:
            due = max(due, self._spent[-self._requests].begun + MINUTE)
        if self._tokens is not None:
            left = sum(spent.tokens for spent in self._spent)
            for spent in self._spent:
                if left + tokens <= self._tokens:
                    break
                left -= spent.tokens
                due = max(due, spent.begun + MINUTE)
        return max(0.0, due - now)


class TokenBudget:
    """At most so many tokens (None: no limit), of which requests under way hold what they may come to. Only one that is
    alone may come to more than is left."""

    def __init__(self, most: int | None, spent: Callable[[], int]) -> None:
        """``spent``: what was counted so far."""
        self._most, self._spent = most, spent
        self._held = 0
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def held(self, tokens: int) -> AsyncIterator[None]:
        """Inside, ``tokens`` are taken to be spent. Waits while those of others leave too little; whether anything is
        left at all is the caller's to ask."""
        if self._most is None:
            yield
            return
        while self._held and self._spent() < self._most < self._spent() + self._held + tokens:
            self._freed.clear()
            await self._freed.wait()
        self._held += tokens
        try:
            yield
        finally:
            self._held -= tokens
            self._freed.set()
