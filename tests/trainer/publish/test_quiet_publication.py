"""A publication between requests: nothing starts meanwhile, and for how long is said."""

from __future__ import annotations

import asyncio
import time

import pytest

from rljob_trainer.errors import EngineError
from rljob_trainer.publish.quiet import QuietPublication
from rljob_trainer.telemetry.names import check_all

PAUSE = "timing/publish_seconds/engine_pause"


class World:
    """Pool and publication; ``happened`` says in which order they were called."""

    def __init__(self, *, fails: bool = False) -> None:
        self.happened: list[str] = []
        self.fails = fails

    async def pause(self, *, interrupt: bool = False) -> None:
        self.happened.append("interrupt" if interrupt else "pause")

    async def wait_idle(self, seconds: float) -> None:
        await asyncio.sleep(0.2)
        self.happened.append("idle")

    def waiting_for(self) -> str:
        return ""

    def resume(self) -> None:
        self.happened.append("resume")

    async def publish(self, version: int) -> dict[str, float]:
        await asyncio.sleep(0.05)
        if self.fails:
            raise EngineError("lost")
        self.happened.append(f"publish {version}")
        return {PAUSE: 0.001, "timing/publish_seconds/transfer": 0.002}


async def test_the_engines_pause_is_from_their_last_token_until_requests_may_run_again() -> None:
    world = World()
    began = time.monotonic()
    metrics = await QuietPublication(world, world, interrupt=False, seconds=5).publish(3)
    whole = time.monotonic() - began
    assert world.happened == ["pause", "idle", "publish 3", "resume"]
    check_all(metrics)
    assert metrics["timing/publish_seconds/transfer"] == 0.002
    # Not the wait for running requests: engines make their tokens then.
    assert 0.05 <= metrics[PAUSE] <= whole - 0.2


async def test_requests_may_run_again_also_after_a_publication_that_failed() -> None:
    world = World(fails=True)
    with pytest.raises(EngineError, match="lost"):
        await QuietPublication(world, world, interrupt=True, seconds=5).publish(3)
    assert world.happened == ["interrupt", "idle", "resume"]
