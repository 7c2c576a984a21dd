"""How the driver talks to one engine: asynchronous calls with a deadline, and Ray's errors in our words."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from rljob_trainer.actor_deaths import DEATHS, cause_of_death
from rljob_trainer.aside import aside
from rljob_trainer.errors import DeadlineError, EngineError, RLJobError
from rljob_trainer.rollout.actor import ACTOR_OPTIONS, EngineActor, EnginePlace, EngineSpec
from rljob_trainer.rollout.engine_loop import EngineLoop

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


class EngineLostError(EngineError):
    """The engine's process is gone; its requests have to be made elsewhere."""


class EngineHandle(Protocol):
    """One engine, wherever it is. ``name`` is unique in the pool."""

    name: str
    place: EnginePlace | None
    """Where its process is; None: beside a learner rank."""

    async def within(
        self, seconds: float, method: Callable[Concatenate[EngineLoop, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What a ``method`` of ``EngineLoop`` returns for these arguments, from the engine's process.

        Raises ``EngineLostError`` when the process is gone, ``DeadlineError`` after ``seconds``, else what the
        engine raised.
        """
        ...

    def kill(self) -> None:
        """Ends the engine at once. Nothing happens if it is gone already."""
        ...


_WORK: Mapping[str, tuple[str, str | None]] = {
    "ready": ("start", "deadlines.startSeconds"),
    "weight_ranks": ("report how it receives weights", "deadlines.progressSeconds"),
    "join_weights": ("connect with the learner for its weights", "deadlines.progressSeconds"),
    "receive_weights": ("load its weights", "deadlines.progressSeconds"),
    "score": ("score the canaries", "deadlines.progressSeconds"),
    "resident": ("report which weights it has", "deadlines.progressSeconds"),
    "submit": ("accept its requests", None),
    "collect": ("return finished requests", None),
    "abort": ("interrupt its requests", None),
    "sleep": ("free the device", None),
    "wake_weights": ("move its weights to the device", None),
    "wake": ("take the device", None),
}
"""What a call is for, and the setting that limits it; those without one get a fixed time."""


class RayEngine:
    """An engine in a Ray actor: one of its own (``RayEngine.start``) or one beside a learner rank (``invoke``)."""

    def __init__(
        self, name: str, invoke: Callable[..., Any], kill: Callable[[], None], place: EnginePlace | None = None
    ) -> None:
        """``invoke(method, *args)`` starts a call and returns its reference; ``kill`` ends the process. ``place``:
        where it is; None beside a rank."""
        self.name = name
        self._invoke = invoke
        self._kill = kill
        self.place = place

    @classmethod
    async def start(cls, name: str, spec: EngineSpec, *, seconds: float = 600.0, **options: Any) -> RayEngine:
        """Starts an engine actor with the given Ray options and waits until it is built."""

        def create() -> Any:
            return ray.remote(EngineActor).options(**{**ACTOR_OPTIONS, **options}).remote(name, spec)

        # Ray asks its head, which may be gone, to register class and actor, and answers when that has answered.
        actor: Any = await aside(create)

        def invoke(method: str, *args: Any, **kwargs: Any) -> Any:
            return getattr(actor, method).remote(*args, **kwargs)

        def kill() -> None:
            ray.kill(actor, no_restart=True)

        starting = cls(name, invoke, kill)
        try:
            await starting._answer("ready", seconds)
            place: EnginePlace = await starting._answer("place", seconds)
        except BaseException:
            kill()
            raise
        if place.program:
            log.info("engine %s on %s: %s", name, place.pod, place.program)
        return cls(name, invoke, kill, place)

    def _too_late(self, method: str, seconds: float) -> str:
        place = "" if self.place is None else f" (process {self.place.process} in {self.place.pod})"
        doing, setting = _WORK.get(method, (f"answer {method}", None))
        if setting is None:
            # It takes an engine one step to answer.
            remedy = "it hangs in a step, or its machine is overloaded; see its log"
        else:
            remedy = f"if it is only slow, raise {setting}; otherwise see its log to find where it hangs"
        return f"engine {self.name}{place} did not {doing} within {seconds:g} s: {remedy}"

    async def within(
        self, seconds: float, method: Callable[Concatenate[EngineLoop, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        answer: T = await self._answer(method.__name__, seconds, *args, **kwargs)
        return answer

    async def _answer(self, method: str, seconds: float, *args: Any, **kwargs: Any) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(self._invoke(method, *args, **kwargs).future())
        except TimeoutError:
            raise DeadlineError(self._too_late(method, seconds)) from None
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RLJobError | ValueError):
                raise cause from error
            raise EngineError(f"engine {self.name}: {method} failed: {error}") from error
        except DEATHS as error:
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise EngineError(f"engine {self.name}: {cause_of_death(error)}") from error
            raise EngineLostError(f"engine {self.name} is gone ({cause_of_death(error)})") from error

    def kill(self) -> None:
        self._kill()
