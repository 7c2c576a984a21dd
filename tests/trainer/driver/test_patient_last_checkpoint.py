"""The last checkpoint of a run waits for a store that does not answer; one on the way is only tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_trainer.checkpoints.checkpoint import Checkpoint
from rljob_trainer.driver import saving as module
from rljob_trainer.driver.saving import BegunGroups, Saving
from rljob_trainer.errors import UnreachableError
from rljob_trainer.record.boundary import Boundary, Totals
from rljob_trainer.telemetry.timing import StageTimes
from rljob_trainer.waits import Waits


class Away:
    """Checkpoints in a store that comes back after some calls."""

    place = "s3://bucket/checkpoints"

    def __init__(self, calls: int, then: Callable[[], None] = lambda: None) -> None:
        self.calls, self.then = calls, then

    async def write(self, step: int, *_: Any) -> Checkpoint:
        self.calls -= 1
        if self.calls >= 0:
            self.then()
            raise UnreachableError("s3://bucket does not answer")
        return Checkpoint(step, self.place, Path)


AT_STEP_7 = Boundary("a run", Totals(step=7, version=7), {}, {"ordinal": 56}, (), 8, {})


def saving(store: Away, stop: list[None]) -> Saving:
    """What saves a run that is at step 7."""
    parts: Any = SimpleNamespace(
        job=SimpleNamespace(spec=SimpleNamespace(deadlines=SimpleNamespace(progress_seconds=60))),
        checkpoints=store,
        fence=SimpleNamespace(check=None),
        learner=SimpleNamespace(save=print),
        limits=SimpleNamespace(suspect=False),
        rollout=SimpleNamespace(settled=lambda *_: None),
        times=StageTimes(),
        trainer=SimpleNamespace(busy=False),
        view=SimpleNamespace(message=lambda _: None),
        waits=Waits(),
    )
    standing = SimpleNamespace(checkpointed=lambda *_: None, not_saved=lambda _: None)
    return Saving(parts, SimpleNamespace(stop=stop, standing=standing))  # type: ignore[arg-type]


async def nothing_begun() -> BegunGroups:
    return {}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.01)


async def test_the_last_checkpoint_is_written_when_the_store_answers_again() -> None:
    run = saving(Away(3), stop=[])
    await run.save(AT_STEP_7, nothing_begun, last=True, must=True)
    assert run.holds(AT_STEP_7)
    assert run.last_in_words == "the last checkpoint is that of step 7"


async def test_one_on_the_way_is_left_out() -> None:
    run = saving(Away(1), stop=[])
    await run.save(AT_STEP_7, nothing_begun, last=False, must=False)
    assert (run.last, run.holds(AT_STEP_7)) == (None, False)


async def test_who_asks_to_stop_meanwhile_does_not_wait_for_the_store() -> None:
    asked: list[None] = []
    run = saving(Away(10**9, then=lambda: asked.append(None)), stop=asked)
    with pytest.raises(UnreachableError):
        await run.save(AT_STEP_7, nothing_begun, last=True, must=True)
