"""An operator, a real API server, and the lives of jobs."""

from __future__ import annotations

import pytest
from fakes.heads import Play
from world import World, job_document

pytestmark = pytest.mark.timeout(180)


async def test_a_job_runs_to_its_end_and_frees_its_cluster(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("first"), Play(steps=3))
    job = await world.until_condition("first", "Succeeded", "True", "Completed")
    assert job["status"]["progress"]["step"] == 3
    assert [attempt["attempt"] for attempt in job["status"]["attempts"]] == [1]
    assert [driver.submission for driver in world.drivers("first")] == ["first-a1"]
    await world.until("no cluster and no pod is left", lambda: _nothing_runs(world))
    conditions = {item["type"]: item for item in job["status"]["conditions"]}
    assert conditions["Running"]["reason"] == "Completed"
    assert conditions["Finished"]["status"] == "True"


async def _nothing_runs(world: World) -> bool:
    return not await world.clusters() and not await world.pods()
