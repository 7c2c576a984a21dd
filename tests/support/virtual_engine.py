"""An engine that sleeps in virtual time and stamps versions, behind the real pool."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.rollout.actor import EnginePlace
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineLostError


@dataclass(slots=True)
class Running:
    """A request in an engine: ``length`` tokens in all, of which ``versions`` tells those that exist."""

    request: GenerationRequest
    length: int
    since: float
    versions: list[int]


class VirtualEngine:
    """An engine behind the pool's handle. Each request makes ``speed`` tokens a second, whatever runs beside it."""

    def __init__(self, name: str, rng: random.Random, speed: float, version: int, tail: float) -> None:
        self.name = name
        self.place: EnginePlace | None = EnginePlace("virtual", 0)
        self.version = version
        self._rng, self._speed, self._tail = rng, speed, tail
        self._running: dict[EpisodeId, Running] = {}
        self._finished: list[GenerationResult] = []
        self._news = asyncio.Event()
        self._dead = False
        self._ended = asyncio.Event()
        self._timers: dict[EpisodeId, asyncio.TimerHandle] = {}

    async def within(self, seconds: float, method: Any, *args: Any) -> Any:
        await asyncio.sleep(0)
        self._check()
        if method is EngineLoop.wait_until_ended:
            await self._ended.wait()
        if method is EngineLoop.collect:
            await self._wait_for_results(*args)
        self._check()
        return getattr(self, f"_{method.__name__}")(*args)

    async def _wait_for_results(self, wait: float, linger: float = 0.0) -> None:
        if not self._finished:
            try:
                async with asyncio.timeout(wait):
                    await self._news.wait()
            except TimeoutError:
                return
        if self._running:
            await asyncio.sleep(linger)

    def kill(self) -> None:
        self._dead = True
        self._news.set()
        self._ended.set()
        for timer in self._timers.values():
            timer.cancel()

    def load(self, version: int) -> None:
        """New weights between two tokens; what runs goes on under them."""
        for running in self._running.values():
            self._make_tokens(running)
        self.version = version

    def _check(self) -> None:
        if self._dead:
            raise EngineLostError(f"engine {self.name} is gone")

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        loop = asyncio.get_running_loop()
        for request in requests:
            # How long a response becomes does not depend on where it is made.
            own = random.Random(request.seed)
            length = min(request.sampling.max_tokens, 1 + int(3 * own.lognormvariate(0, self._tail)))
            running = Running(request, length, loop.time(), request.begun.versions.tolist())
            self._running[request.id] = running
            left = (length - len(running.versions)) / self._speed
            self._timers[request.id] = loop.call_later(left, self._end, request.id)

    def _collect(self, *_: float) -> list[GenerationResult]:
        finished, self._finished = self._finished, []
        self._news.clear()
        return finished

    def _abort(self, names: Sequence[EpisodeId] | None = None) -> list[GenerationResult]:
        aborted = []
        for name in list(self._running) if names is None else [name for name in names if name in self._running]:
            running = self._running.pop(name)
            self._timers.pop(name).cancel()
            self._make_tokens(running)
            aborted.append(_result(running, "aborted"))
        return aborted

    def _close(self) -> None:
        self.kill()

    def _end(self, name: EpisodeId) -> None:
        running = self._running.pop(name)
        del self._timers[name]
        running.versions += [self.version] * (running.length - len(running.versions))
        self._finished.append(_result(running, "stop"))
        self._news.set()

    def _make_tokens(self, running: Running) -> None:
        """Those that have become complete since the last look."""
        now = asyncio.get_running_loop().time()
        made = min(int((now - running.since) * self._speed), running.length - len(running.versions))
        running.versions += [self.version] * made
        running.since += made / self._speed


def _result(running: Running, finish: Any) -> GenerationResult:
    versions = np.array(running.versions, np.int32)
    return GenerationResult(running.request.id, Tokens.sampled(versions, versions.astype(np.float32), versions), finish)
