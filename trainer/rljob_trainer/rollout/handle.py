"""How the driver talks to one engine: asynchronous calls with a deadline, and Ray's errors in our words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import ray
from ray.exceptions import RayTaskError

from rljob_trainer.actor_deaths import DEATHS, cause_of_death
from rljob_trainer.errors import DeadlineError, EngineError, RLJobError
from rljob_trainer.rollout.actor import ACTOR_OPTIONS, EngineActor, EnginePlace, EngineSpec


class EngineLostError(EngineError):
    """The engine's process is gone; its requests have to be made elsewhere."""


class EngineHandle(Protocol):
    """One engine, wherever it is. ``name`` is unique in the pool."""

    name: str
    place: EnginePlace | None
    """Where its process is; None: beside a learner rank."""

    async def call(self, method: str, *args: Any, seconds: float) -> Any:
        """Calls a method of ``EngineLoop`` or ``EngineActor`` by its name.

        Raises ``EngineLostError`` when the process is gone, ``DeadlineError`` after ``seconds``, else what the
        engine raised.
        """
        ...

    def kill(self) -> None:
        """Ends the engine at once. Nothing happens if it is gone already."""
        ...


class RayEngine:
    """An engine in a Ray actor: one of its own (``RayEngine.start``) or one beside a learner rank (``invoke``)."""

    def __init__(self, name: str, invoke: Callable[..., Any], kill: Callable[[], None]) -> None:
        """``invoke(method, *args)`` starts a call and returns its reference; ``kill`` ends the process."""
        self.name = name
        self.place: EnginePlace | None = None
        self._invoke = invoke
        self._kill = kill

    @classmethod
    async def start(cls, name: str, spec: EngineSpec, *, seconds: float = 600.0, **options: Any) -> RayEngine:
        """Starts an engine actor with the given Ray options and waits until it is built."""
        actor: Any = ray.remote(EngineActor).options(**{**ACTOR_OPTIONS, **options}).remote(name, spec)
        handle = cls(
            name,
            lambda method, *args: getattr(actor, method).remote(*args),
            lambda: ray.kill(actor, no_restart=True),
        )
        try:
            await handle.call("ready", seconds=seconds)
            handle.place = await handle.call("place", seconds=seconds)
        except BaseException:
            handle.kill()
            raise
        return handle

    async def call(self, method: str, *args: Any, seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(self._invoke(method, *args).future())
        except TimeoutError:
            raise DeadlineError(f"engine {self.name} did not answer {method} within {seconds:g} s") from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RLJobError | ValueError):
                raise cause from error
            raise EngineError(f"engine {self.name}: {method} failed: {error}") from error
        except DEATHS as error:
            raise EngineLostError(f"engine {self.name} is gone ({cause_of_death(error)})") from error

    def kill(self) -> None:
        self._kill()
