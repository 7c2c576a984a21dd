"""What the parts of a run say that they wait for; in virtual time, without processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tiny_job import copy_job

from rljob_api import load_jobs, resolve
from rljob_trainer.checkpoints.checkpoint import Checkpoint
from rljob_trainer.driver.assemble import learner_stages
from rljob_trainer.driver.saving import BegunGroups, Saving
from rljob_trainer.errors import DeadlineError
from rljob_trainer.record.boundary import Boundary, Totals
from rljob_trainer.simulation.clock import run_virtual
from rljob_trainer.telemetry.timing import StageTimes
from rljob_trainer.waits import Waits


def resolved(**changes: Any) -> Any:
    [job] = load_jobs(yaml.safe_dump(copy_job(deadlines={"progressSeconds": 600}, **changes)))
    return resolve(job)


def test_the_learners_stages_are_waits_with_its_deadline_and_the_drivers_own_are_none() -> None:
    waits, times = Waits(lambda: 0.0), StageTimes()
    stage = learner_stages(resolved(trainer={"replicas": 2}).spec, times, waits)
    said = {}
    for name in ("score", "advantage", "update"):
        with stage(name):
            said[name] = None if waits.latest is None else (waits.latest.sentence, waits.left(waits.latest))
    assert said == {
        "score": ("trainer waits for the learner's 2 ranks to score the batch for the update", 600),
        "advantage": None,
        "update": ("trainer waits for the learner's 2 ranks to finish the update", 600),
    }
    assert list(times.totals) == ["score", "advantage", "update"]


class Storage:
    """One that never ends to write and read."""

    place = "/storage/checkpoints"

    async def write(self, *_: Any) -> Checkpoint:
        await asyncio.sleep(1e9)
        raise AssertionError

    async def load(self, folder: Path, belongs_to: str = "") -> None:
        await asyncio.sleep(1e9)


AT_STEP_7 = Boundary("a run", Totals(step=7, version=7), {}, {}, (), 8, {})


def saving_into(storage: Storage, waits: Waits) -> Saving:
    parts: Any = SimpleNamespace(
        job=resolved(),
        waits=waits,
        times=StageTimes(),
        trainer=SimpleNamespace(busy=False),
        limits=SimpleNamespace(suspect=False),
        learner=SimpleNamespace(save=storage.write),
        fence=SimpleNamespace(check=None),
        checkpoints=storage,
    )
    return Saving(parts, SimpleNamespace(stop=None, standing=None))  # type: ignore[arg-type]


async def nothing_begun() -> BegunGroups:
    return {}


def test_a_checkpoint_that_the_storage_never_takes_ends_at_the_deadline() -> None:
    async def main() -> None:
        waits = Waits(asyncio.get_running_loop().time)
        writing = asyncio.create_task(
            saving_into(Storage(), waits).save(AT_STEP_7, nothing_begun, last=False, must=False)
        )
        await asyncio.sleep(100)
        wait = waits.latest
        assert wait is not None
        assert wait.sentence == "trainer waits for the checkpoint of step 7 to be written to /storage/checkpoints"
        assert waits.left(wait) == 500
        with pytest.raises(DeadlineError, match=r"checkpoint of step 7 .* longer than 600 s .deadlines"):
            await writing

    run_virtual(main())
