"""One operator for the whole cluster, and one that is restricted to a namespace."""

from __future__ import annotations

import pytest
from fakes.heads import Play
from world import Object, World, job_document

pytestmark = pytest.mark.timeout(400)


async def jobs_everywhere(world: World) -> list[Object]:
    return list((await world.call("GET", "/apis/rljob.dev/v1alpha1/rljobs"))["items"])


async def test_an_operator_without_namespaces_serves_them_all(world: World, other_world: World) -> None:
    async def alone() -> bool:
        return await jobs_everywhere(world) == []

    # It would serve what other tests left behind, too.
    await world.until("the jobs of other tests are gone", alone)
    # Namesakes, to be told apart.
    play = Play(steps=None)
    await other_world.apply(job_document("twin"), play)
    world.start_operator(all_namespaces=True)
    await world.apply(job_document("twin"), play)
    for each in (world, other_world):
        await each.until_condition("twin", "Running", "True", "Training")
    await world.patch("twin", {"rollout": {"replicas": 1}})
    await world.until_condition("twin", "Resizing", "False", "AtSize")
    assert [len(await each.pods("rollout")) for each in (world, other_world)] == [1, 2]
    assert world.heads.refused == []
    await world.delete("twin")

    async def nothing_is_left() -> bool:
        return await world.owned_objects() == []

    await world.until("nothing is left of the first", nothing_is_left)
    play.steps = 1
    await other_world.until_condition("twin", "Succeeded", "True")
    assert len(world.drivers("twin")) == 2


async def test_an_operator_of_one_namespace_leaves_the_others_alone(world: World, other_world: World) -> None:
    await other_world.apply(job_document("theirs"), Play(steps=2))
    operator = world.start_operator()
    await world.apply(job_document("mine"), Play(steps=2))
    await world.until_condition("mine", "Succeeded", "True")
    # Its first list is complete: it would know the other's job by now.
    assert operator.operator is not None
    assert operator.operator.store.jobs() == [(world.namespace, "mine")]
    theirs = await other_world.job("theirs")
    assert "status" not in theirs
    assert (await other_world.owned_objects(), await other_world.events("theirs")) == ([], [])
    # Nothing was wrong with it.
    other_world.start_operator()
    await other_world.until_condition("theirs", "Succeeded", "True")
    assert [len(world.drivers(name)) for name in ("mine", "theirs")] == [1, 1]
    assert operator.operator.store.jobs() == [(world.namespace, "mine")]
