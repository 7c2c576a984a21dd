"""Engines in this process behind the interface that pools talk to: real torch engines, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from rljob_trainer.rollout.actor import EnginePlace
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineLostError
from rljob_trainer.rollout.torch_engine import TorchEngine

P = ParamSpec("P")
T = TypeVar("T")


class LocalEngine:
    """An ``EngineHandle``. What it has finished is handed over when it may; ``kill`` is as the death of a process."""

    def __init__(self, name: str, folder: Path, *, free: bool = True) -> None:
        self.name = name
        self.place: EnginePlace | None = EnginePlace(f"pod-{name}", 0)
        self.may = asyncio.Event()
        if free:
            self.may.set()
        self.hangs = False
        """Whether it is as a process that was stopped: nothing asked of it from now on is answered."""
        self.dead = asyncio.Event()
        self.calls: list[str] = []
        self._loop = EngineLoop(lambda: TorchEngine.from_folder(str(folder)), name)

    async def within(
        self, seconds: float, method: Callable[Concatenate[EngineLoop, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self.calls.append(method.__name__)
        call = asyncio.create_task(self._answer(method, *args, **kwargs))
        dead = asyncio.create_task(self.dead.wait())
        try:
            await asyncio.wait({call, dead}, return_when=asyncio.FIRST_COMPLETED)
            if dead.done():
                raise EngineLostError(f"engine {self.name} is gone (killed)")
            return call.result()
        finally:
            call.cancel()
            dead.cancel()

    async def _answer(self, method: Callable[Concatenate[EngineLoop, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        name = method.__name__
        if name == "wait_until_ended" or self.hangs:
            await asyncio.Event().wait()
        if name == "collect":
            await self.may.wait()
        return await asyncio.to_thread(method, self._loop, *args, **kwargs)

    def kill(self) -> None:
        self.dead.set()
        self._loop.close()
