"""Engines in real time: one of a fixed speed that all requests share, and one that takes a fixed time for each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from rljob_trainer.episodes.requests import Finished, GenerationRequest, GenerationResult
from rljob_trainer.episodes.tokens import Tokens

_TICK_SECONDS = 0.005


@dataclass(slots=True, eq=False)
class _Running:
    left: int
    done: asyncio.Future[None]


class FixedSpeed:
    """Makes ``rate`` tokens a second, spread evenly over the requests that are there. Each answer has ``length``
    tokens. Time in which nothing is asked for is lost."""

    def __init__(self, rate: float, length: int, letters: Sequence[int]) -> None:
        """``letters``: token ids, of which answers are made."""
        self.made = 0
        """Tokens so far."""
        self._rate, self._length, self._letters = rate, length, letters
        self._running: dict[_Running, None] = {}

    async def generate(
        self, requests: Sequence[GenerationRequest], finished: Finished | None = None
    ) -> list[GenerationResult]:
        return await asyncio.gather(*map(self._answered, requests))

    async def run(self) -> None:
        """Makes tokens until it is cancelled."""
        loop, owed = asyncio.get_running_loop(), 0.0
        last = loop.time()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = loop.time()
            owed = owed + (now - last) * self._rate if self._running else 0.0
            last = now
            while owed >= 1 and self._running:
                owed -= self._shared(int(owed))

    def _shared(self, tokens: int) -> int:
        """Hands out up to so many tokens, the same number to each request; those that come first have one more."""
        each, more = divmod(tokens, len(self._running))
        given = 0
        for place, request in enumerate(list(self._running)):
            part = min(request.left, each + (place < more))
            request.left -= part
            given += part
            del self._running[request]
            if request.left:
                self._running[request] = None  # behind the others
            elif not request.done.done():
                request.done.set_result(None)
        self.made += given
        return given

    async def _answered(self, request: GenerationRequest) -> GenerationResult:
        length = min(self._length, request.sampling.max_tokens)
        running = _Running(length, asyncio.get_running_loop().create_future())
        self._running[running] = None
        try:
            await running.done
        finally:
            self._running.pop(running, None)
        return answer_of(request, length, self._letters)


class FixedTime:
    """Answers each request after ``seconds``, with ``length`` tokens."""

    def __init__(self, seconds: float, length: int, letters: Sequence[int]) -> None:
        self._seconds, self._length, self._letters = seconds, length, letters

    async def generate(
        self, requests: Sequence[GenerationRequest], finished: Finished | None = None
    ) -> list[GenerationResult]:
        await asyncio.sleep(self._seconds)
        return [answer_of(request, self._length, self._letters) for request in requests]


def answer_of(request: GenerationRequest, length: int, letters: Sequence[int]) -> GenerationResult:
    """An answer of so many letters."""
    ids = np.fromiter(islice(cycle(letters), length), np.int32, length)
    tokens = Tokens.sampled(ids, np.full(length, -1, np.float32), np.zeros(length, np.int32))
    return GenerationResult(request.id, tokens, "stop")
