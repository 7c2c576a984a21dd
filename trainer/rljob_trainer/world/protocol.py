"""What an environment's programs see of the world: calls that are recorded, so that none is made twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, Self

Json = Any
"""What ``json.dumps`` writes and ``json.loads`` reads back as it was."""


class WorldError(Exception):
    """The world failed: a service is down, a sandbox is gone. It says nothing about the response: an episode that met
    it has failed, and has no reward."""


class WorldGoneError(WorldError):
    """What failed was asked again until its own deadline: who meets this need not ask once more."""


def failure_of_the_world(error: BaseException) -> WorldError | None:
    """The ``WorldError`` that this is, or that is among those of a group (of tasks, say); None: there is none."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(failure_of_the_world, error.exceptions)), None)
    return error if isinstance(error, WorldError) else None


class World(Protocol):
    """Calls of one episode, in the order in which its program makes them."""

    @property
    def seed(self) -> int:
        """63 bits, a function of the job's seed and the prompt: equal for all samples of the prompt."""
        ...

    @property
    def key(self) -> str:
        """Names the call that is being made: the same each time that it is made again, and no other call's."""
        ...

    def branch(self, name: str) -> Self:
        """For calls that the program makes beside others: their order among those does not matter."""
        ...

    async def call(self, kind: str, function: Callable[..., Awaitable[Json]], *arguments: Json) -> Json:
        """What ``function(*arguments)`` returns. When the program is run again it is not called: the recorded result
        is returned. ``kind`` names what is called, in the record, in waits and in messages.

        Raises ``TypeError`` for arguments and results that are no JSON, and what the function raises, which is not
        recorded: ``WorldError`` for failures that are not the response's.
        """
        ...
