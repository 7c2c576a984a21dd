"""Of which versions the learner has the weights: its present ones, those that it kept, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rljob_trainer.driver.training import PipelineTrainer
from rljob_trainer.episodes.episode import Group
from rljob_trainer.errors import StepGivenUpError
from rljob_trainer.pipeline.parts import TrainedBatch
from rljob_trainer.publish.held_weights import HeldWeights

pytestmark = pytest.mark.integrity


class Step:
    """An update that lasts until it is allowed to end."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def run(self, groups: Sequence[Group], *, number: int, version: int) -> TrainedBatch:
        await self.may_end.wait()
        return TrainedBatch()


class Published:
    async def publish(self, version: int) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(("keeps", "first"), [(True, [0]), (False, [])])
async def test_between_two_pulls_it_is_what_the_version_began_with(keeps: bool, first: list[int]) -> None:
    step, held = Step(), HeldWeights(keeps_first=keeps)
    trainer = PipelineTrainer(step, Published(), held=held)  # type: ignore[arg-type]
    seen = [held.versions]
    for _ in range(2):
        step.may_end.clear()
        pull = asyncio.create_task(trainer.train([], step=1, version=0))
        await asyncio.sleep(0)
        seen.append(held.versions)
        step.may_end.set()
        await pull
        seen.append(held.versions)
    await trainer.publish(1)
    assert [list(versions) for versions in seen] == [[0], [], first, [], first]
    assert list(held.versions) == [1, *first]


async def test_while_a_publication_is_under_way_the_new_weights_have_the_new_number() -> None:
    step, held = Step(), HeldWeights(keeps_first=True)
    step.may_end.set()

    class Looks:
        async def publish(self, version: int) -> dict[str, float]:
            assert list(held.versions) == [version, version - 1]
            return {}

    trainer = PipelineTrainer(step, Looks(), held=held)  # type: ignore[arg-type]
    for version in range(3):
        await trainer.train([], step=version + 1, version=version)
        await trainer.publish(version + 1)


async def test_an_update_that_was_cut_off_leaves_none() -> None:
    held = HeldWeights(keeps_first=True)
    trainer = PipelineTrainer(Step(), Published(), held=held)  # type: ignore[arg-type]
    pull = asyncio.create_task(trainer.train([], step=1, version=0))
    await asyncio.sleep(0)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    assert (trainer.busy, list(held.versions)) == (True, [])


async def test_an_update_that_was_given_up_leaves_what_there_was() -> None:
    class GivenUp(Step):
        async def run(self, groups: Sequence[Group], *, number: int, version: int) -> TrainedBatch:
            if number == 2:
                raise StepGivenUpError("asked to")
            return TrainedBatch()

    held = HeldWeights(keeps_first=True)
    trainer = PipelineTrainer(GivenUp(), Published(), held=held)  # type: ignore[arg-type]
    with pytest.raises(StepGivenUpError):
        await trainer.train([], step=2, version=0)
    assert (trainer.busy, list(held.versions)) == (False, [0])
    await trainer.train([], step=1, version=0)
    with pytest.raises(StepGivenUpError):
        await trainer.train([], step=2, version=0)
    assert (trainer.busy, list(held.versions)) == (True, [0])  # those that the version began with


async def test_weights_that_are_read_have_no_number_before_they_are_published() -> None:
    held = HeldWeights(keeps_first=True)
    trainer = PipelineTrainer(Step(), Published(), held=held)  # type: ignore[arg-type]
    seen = []

    async def read() -> None:
        seen.append(list(held.versions))

    await trainer.restore(read, 7, 5)
    assert seen == [[]]
    assert list(held.versions) == [7]
