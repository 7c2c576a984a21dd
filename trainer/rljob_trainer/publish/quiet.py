"""What a publication is to whoever trains, and the one that lets engines finish or pause first."""

from __future__ import annotations

import time
from typing import Protocol

from rljob_trainer.waits import Waits


class Publication(Protocol):
    """Brings the learner's weights into all engines."""

    async def publish(self, version: int) -> dict[str, float]:
        """Returns metrics once every engine serves ``version``. Raises ``DeadlineError`` naming who did not answer."""
        ...


class Pausing(Protocol):
    """A pool whose engines can be kept from starting, and stopped in the middle of, requests."""

    async def pause(self, *, interrupt: bool = False) -> None: ...

    @property
    def finished_at(self) -> float:
        """When a request was finished last, in the time of the running event loop."""
        ...

    async def wait_idle(self, seconds: float) -> None: ...

    def waiting_for(self) -> str: ...

    def resume(self) -> None: ...


class QuietPublication:
    """A publication to engines that have nothing in hand: running requests finish first, or are interrupted and go on
    from the tokens they have, under the new weights."""

    def __init__(
        self, publication: Publication, pool: Pausing, *, interrupt: bool, seconds: float, waits: Waits | None = None
    ) -> None:
        """``seconds``: how long running requests may go on without one that finishes."""
        self._waits = waits or Waits()
        self._publication = publication
        self._pool = pool
        self._interrupt = interrupt
        self._seconds = seconds

    async def publish(self, version: int) -> dict[str, float]:
        await self._pool.pause(interrupt=self._interrupt)
        try:
            reason = lambda: f"running requests to finish before the publication; {self._pool.waiting_for()}"  # noqa: E731
            with self._waits.wait("trainer", reason, self._seconds, progress=lambda: self._pool.finished_at):
                await self._pool.wait_idle(self._seconds)
            idle = time.monotonic()
            metrics = await self._publication.publish(version)
        finally:
            self._pool.resume()
        return metrics | {"timing/publish_seconds/engine_pause": time.monotonic() - idle}
