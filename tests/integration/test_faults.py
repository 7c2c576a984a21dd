"""Faults on the way to a real API server: every job gets where its spec wants it, and nothing happens twice."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
from fakes.bad_network import BadNetwork
from fakes.heads import Play
from kube.crowding import crowding
from world import SETTINGS, World, job_document

from rljob_operator import inventory
from rljob_operator.api_server import CALL_SECONDS, ApiServer

pytestmark = pytest.mark.timeout(1800)


async def nothing_runs(world: World) -> bool:
    return not await world.clusters() and not await world.pods()


async def lives_through_everything(world: World, name: str) -> None:
    """Two attempts, a suspension and a change of size: nearly every write there is."""
    play = Play(steps=None, exits={1: 1}, checkpoints=True)
    await world.apply(job_document(name, retry={"limit": 20, "backoffSeconds": 0}), play)
    await world.until("attempt 2 runs", lambda: any(driver.attempt >= 2 for driver in world.drivers(name)))
    await world.until_condition(name, "Running", "True", "Training")
    await world.patch(name, {"rollout": {"replicas": 3}})
    await world.until_condition(name, "Resizing", "False", "AtSize")
    await world.patch(name, {"rollout": {"replicas": 1}})

    async def one_engine() -> bool:
        return len(await world.pods("rollout")) == 1

    await world.until("one engine is left", one_engine)
    await world.patch(name, {"suspend": True})
    await world.until_condition(name, "Suspended", "True")
    await world.patch(name, {"suspend": False})
    play.steps = 2
    await world.until_condition(name, "Succeeded", "True")
    await world.until("the cluster is freed", lambda: nothing_runs(world))


def assert_nothing_happened_twice(world: World, name: str) -> None:
    attempts = [driver.attempt for driver in world.drivers(name)]
    assert attempts == sorted(set(attempts))


@pytest.mark.slow(stands_for="[1]")
@pytest.mark.parametrize("seed", [1, 2])
async def test_the_operator_is_killed_after_every_third_write_or_so(
    world: World, network: BadNetwork, seed: int
) -> None:
    dice = random.Random(seed)

    def kill(_number: int, _method: str, _path: str) -> None:
        # Not after every write: an operator that never gets to a second one can't get anywhere.
        if world.operator is not None and dice.random() < 1 / 3:
            world.operator.cancel()

    network.after = kill
    done = asyncio.Event()

    async def revive() -> None:
        while not done.is_set():
            if world.operator is None or not world.operator.alive:
                world.start_operator(network.address)
            await asyncio.sleep(0.02)

    reviver = asyncio.create_task(revive())
    try:
        await lives_through_everything(world, "immortal")
    finally:
        done.set()
        await reviver
    assert_nothing_happened_twice(world, "immortal")
    assert network.writes > 20


@pytest.mark.slow(stands_for=["[409]", "[503]"])
@pytest.mark.parametrize("status", [409, 429, 500, 503])
async def test_four_of_ten_writes_fail(world: World, network: BadNetwork, status: int) -> None:
    dice = random.Random(status)
    network.before = lambda _number, _method, _path: status if dice.random() < 0.4 else None
    world.start_operator(network.address)
    await lives_through_everything(world, "unlucky")
    assert_nothing_happened_twice(world, "unlucky")


async def test_answers_are_lost(world: World, network: BadNetwork) -> None:
    dice = random.Random(7)
    network.lose_answer = lambda _number: dice.random() < 0.3
    world.start_operator(network.address)
    await lives_through_everything(world, "deafened")
    assert_nothing_happened_twice(world, "deafened")


async def test_watches_are_cut(world: World, network: BadNetwork) -> None:
    world.start_operator(network.address)
    done = asyncio.Event()

    async def cut() -> None:
        while not done.is_set():
            network.cut_watches()
            await asyncio.sleep(0.3)

    cutter = asyncio.create_task(cut())
    try:
        await lives_through_everything(world, "cut-off")
    finally:
        done.set()
        await cutter
    assert_nothing_happened_twice(world, "cut-off")


@pytest.mark.slow(stands_for="[1]")
@pytest.mark.parametrize("seed", [1, 2])
async def test_events_are_told_twice_late_and_in_another_order(world: World, network: BadNetwork, seed: int) -> None:
    dice = random.Random(seed)
    held_of: dict[str, list[bytes]] = defaultdict(list)

    def tell(path: str, line: bytes) -> list[bytes]:
        told, held = [line], held_of[path]
        if b'"ADDED"' in line or b'"MODIFIED"' in line:
            if held and dice.random() < 0.5:
                # An old event after a newer one.
                told.append(held.pop(dice.randrange(len(held))))
            if dice.random() < 0.3:
                told.append(line)
            if dice.random() < 0.3:
                held.append(line)
        return told

    network.tell = tell
    world.start_operator(network.address)
    await lives_through_everything(world, "confused")
    assert_nothing_happened_twice(world, "confused")


async def test_two_writes_get_no_answer_at_all(
    world: World, network: BadNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each costs the operator its whole patience with one call: half a minute, but here.
    seconds = min(CALL_SECONDS, 5 * crowding())
    monkeypatch.setattr("rljob_operator.operator.ApiServer", partial(ApiServer, call_seconds=seconds))
    world.patience += 2 * seconds
    network.hang = lambda number: number in (3, 9)
    world.start_operator(network.address)
    await world.apply(job_document("patient"), Play(steps=3))
    await world.until_condition("patient", "Running", "True")
    await world.until_condition("patient", "Succeeded", "True")
    assert network.writes > 9
    assert_nothing_happened_twice(world, "patient")


async def test_the_restarted_operator_finds_what_happened_meanwhile(world: World) -> None:
    world.start_operator()
    play = Play(steps=None)
    await world.apply(job_document("patient"), play)
    await world.until_condition("patient", "Running", "True", "Training")
    await world.stop_operator()
    play.steps = 1
    await world.patch("patient", {"rollout": {"replicas": 3}})
    world.start_operator()
    await world.until_condition("patient", "Succeeded", "True")
    assert len(world.drivers("patient")) == 1


async def test_tokens_are_nowhere_to_be_read(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    world.start_operator()
    await world.apply(job_document("secretive"), Play(steps=3))
    await world.until("a driver runs", lambda: world.drivers("secretive"))
    secrets = (await world.call("GET", f"/api/v1/namespaces/{world.namespace}/secrets"))["items"]
    import base64

    values = [base64.b64decode(value).decode() for item in secrets for value in item["data"].values()]
    assert len(values) == 2
    job = await world.until_condition("secretive", "Succeeded", "True")
    events = await world.call("GET", f"/api/v1/namespaces/{world.namespace}/events")
    driver = world.drivers("secretive")[0]
    everywhere = f"{job}{events}{driver.entrypoint}{driver.environment}{caplog.text}"
    for value in itertools.chain(values, ["k" * 64]):
        assert value not in everywhere


async def test_a_deletion_that_no_watch_tells_of_is_noticed(world: World, network: BadNetwork) -> None:
    """As after "410 Gone", when kopf lists anew: what isn't in a list brings no event."""
    untold = 0

    def tell(path: str, line: bytes) -> list[bytes]:
        nonlocal untold
        if path.endswith("/pods") and b'"type":"DELETED"' in line:
            untold += 1
            return []
        return [line]

    network.tell = tell
    world.start_operator(network.address, replace(SETTINGS, sweep_seconds=3.0))
    await world.apply(job_document("untold"), Play(steps=None))
    await world.until_condition("untold", "Running", "True", "Training")
    await world.patch("untold", {"suspend": True})
    await world.until_condition("untold", "Suspended", "True")
    assert untold == 4
    await world.patch("untold", {"suspend": False})
    await world.until_condition("untold", "Running", "True", "Training")


@pytest.mark.parametrize("group", ["rljob.dev", "ray.io"])
async def test_an_operator_that_began_before_a_kind_was_served_makes_way_for_one_that_hears(
    world: World, network: BadNetwork, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    monkeypatch.setattr(inventory, "UNHEARD_SECONDS", 1.0)
    network.forgets = group
    deaf = world.start_operator(network.address)
    await world.until("the kinds are asked for", lambda: network.forgot)
    network.forgets = None
    await world.apply(job_document("unheard"), Play(steps=None))
    async with asyncio.timeout(60):
        while deaf.alive:  # noqa: ASYNC110  (a thread)
            await asyncio.sleep(0.05)
    assert isinstance(deaf.failure, ExceptionGroup)
    assert [type(error) for error in deaf.failure.exceptions] == [inventory.UnwatchedError]
    world.start_operator(network.address)
    await world.until_condition("unheard", "Running", "True", "Training")
