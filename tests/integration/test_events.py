"""Events on the real API server: it takes them as they are, and whoever describes the job finds them."""

from __future__ import annotations

import pytest
from fakes.heads import Play
from world import World, job_document

from rljob_operator.actions import Event
from rljob_operator.api_server import ApiServer
from rljob_operator.events import Poster
from rljob_operator.store import Store

pytestmark = pytest.mark.timeout(400)


async def test_the_server_takes_notes_of_any_length_and_language(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rljob_operator.events")
    await world.apply(job_document("told"))
    store = Store()
    job = store.job(store.put_job(await world.job("told")))
    assert job is not None
    notes = {"Letters": "a" * 3000, "Accents": "é" * 3000, "Chinese": "a" + "值" * 3000, "Nothing": ""}
    async with ApiServer(world.plane.credentials()) as api:
        await Poster(api).post(job, [Event("Warning", reason, note) for reason, note in notes.items()])
    assert caplog.messages == []
    found = {item["reason"]: item.get("message", "") for item in await world.events("told")}
    assert found.keys() == notes.keys()
    for reason, note in found.items():
        assert notes[reason].startswith(note.removesuffix("…"))


async def test_a_life_is_told_to_whoever_describes_the_job(world: World) -> None:
    world.start_operator()
    await world.apply(job_document("storied"), Play(steps=2))
    await world.until_condition("storied", "Succeeded", "True")

    async def described() -> str:
        done = world.plane.kubectl("describe", "rlj", "storied", "--namespace", world.namespace)
        return done.stdout if "Completed" in done.stdout.partition("\nEvents:")[2] else ""

    text = (await world.until("the end is told", described)).partition("\nEvents:")[2]
    life = ("PoolsReady", "Starting", "Training", "Completed")
    lines = [line.split()[:2] for line in text.splitlines() if line.split()[1:2] and line.split()[1] in life]
    # From top to bottom, as it happened.
    assert lines == [["Normal", reason] for reason in life]
