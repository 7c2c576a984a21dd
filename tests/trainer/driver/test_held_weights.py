"""Which of the learner's weights are those that engines serve: its own, those that it kept, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rljob_trainer.driver.training import PipelineTrainer
from rljob_trainer.samples import Group


class Step:
    """An update that lasts until it is allowed to end."""

    def __init__(self, *, keeps_first_weights: bool) -> None:
        self.keeps_first_weights = keeps_first_weights
        self.may_end = asyncio.Event()

    async def run(self, groups: Sequence[Group], *, number: int, version: int) -> dict[str, float]:
        await self.may_end.wait()
        return {}


class Published:
    async def publish(self, version: int) -> dict[str, float]:
        return {}


@pytest.mark.parametrize(("keeps", "between_pulls"), [(True, "first"), (False, None)])
async def test_between_two_pulls_it_is_what_the_version_began_with(keeps: bool, between_pulls: str | None) -> None:
    step = Step(keeps_first_weights=keeps)
    trainer = PipelineTrainer(step, Published())  # type: ignore[arg-type]
    seen = [trainer.holds]
    for _ in range(2):
        step.may_end.clear()
        pull = asyncio.create_task(trainer.train([], step=1, version=0))
        await asyncio.sleep(0)
        seen.append(trainer.holds)
        step.may_end.set()
        await pull
        seen.append(trainer.holds)
    await trainer.publish(1)
    assert seen == ["present", None, between_pulls, None, between_pulls]
    assert trainer.holds == "present"


async def test_an_update_that_was_cut_off_leaves_none() -> None:
    trainer = PipelineTrainer(Step(keeps_first_weights=True), Published())  # type: ignore[arg-type]
    pull = asyncio.create_task(trainer.train([], step=1, version=0))
    await asyncio.sleep(0)
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    assert (trainer.busy, trainer.holds) == (True, None)
