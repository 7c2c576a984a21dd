"""``deadlines.progressSeconds`` is a time without a finished sample, not the time of a whole batch; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from in_turn import LONG, InTurn, pool_with

from rljob_trainer.episodes.episode import Group, Prompt, RewardResult
from rljob_trainer.episodes.group import GenerationSettings, GroupRollout, Scoring
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import BegunTurn, GenerationRequest
from rljob_trainer.episodes.single_turn import SingleTurn
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.errors import DeadlineError
from rljob_trainer.pipeline.loop import Pipeline
from rljob_trainer.pipeline.parts import StepRecord, TrainedBatch
from rljob_trainer.pipeline.schedule import Schedule, ScheduleSettings
from rljob_trainer.pools import members
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.publish.quiet import QuietPublication
from rljob_trainer.simulation.clock import run_virtual
from rljob_trainer.validation.validator import HeldOut, Validator
from rljob_trainer.waits import Waits


def virtual_waits() -> Waits:
    return Waits(asyncio.get_running_loop().time)


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(EpisodeId("training", 0, i), (1,), LONG, seed=i) for i in range(count)]


class AtOnce:
    """Rewards that take no time."""

    def in_processes(self, source: str) -> bool:
        return False

    async def score(self, group: Group) -> list[RewardResult]:
        return [RewardResult(0.0) for _ in group.episodes]


class Trainer:
    """Trains and publishes in no time, and remembers what."""

    def __init__(self) -> None:
        self.trained: list[int] = []

    async def train(self, groups: Sequence[Group], *, step: int, version: int) -> TrainedBatch:
        self.trained += [group.prompt.ordinal for group in groups]
        return TrainedBatch()

    async def publish(self, version: int) -> dict[str, float]:
        return {}


def prompt(number: int) -> Prompt:
    return Prompt(number, 0, number, "test", "", (1,), None)


class Feed:
    """So many prompts."""

    def __init__(self, prompts: int) -> None:
        self._prompts = iter(range(prompts))

    async def prepare(self, prompts: int) -> bool:
        return True

    def next(self) -> Prompt | None:
        number = next(self._prompts, None)
        return None if number is None else prompt(number)

    def state_dict(self) -> dict[str, object]:
        return {}


async def go_on(record: StepRecord) -> bool:
    return True


def rollout_on(pool: RolloutPool, samples: int) -> GroupRollout:
    settings = GenerationSettings(samples, LONG, seed=0)
    return GroupRollout(SingleTurn(), pool, AtOnce(), lambda texts: [""] * len(texts), settings)


@pytest.mark.parametrize(("samples", "groups"), [(1, 4), (4, 1)])
def test_a_batch_may_take_longer_than_the_deadline_while_samples_are_finished(samples: int, groups: int) -> None:
    """Four samples of 100 s each: of four groups, and of one, of which nothing is finished before 400 s."""

    async def main() -> None:
        pool, waits, trainer = pool_with(InTurn("0", sticks_after=8)), virtual_waits(), Trainer()
        pipeline = Pipeline(
            Feed(3 * groups),
            rollout_on(pool, samples),
            trainer,
            Schedule(ScheduleSettings(groups, groups, 0)),
            after_step=go_on,
            sample_deadline_seconds=150,
            waits=waits,
        )
        running = asyncio.create_task(pipeline.run())
        await asyncio.sleep(350)
        wait = waits.latest
        assert wait is not None
        assert waits.seconds(wait) == pytest.approx(350)
        assert 90 < (waits.left(wait) or 0) < 110
        with pytest.raises(DeadlineError, match=r"No sample was finished within 150 s \(deadlines\.progressSeconds\)"):
            await running
        assert asyncio.get_running_loop().time() == pytest.approx(800 + 150, abs=1), "from the end of the second batch"
        assert len(trainer.trained) == 2 * groups
        await pool.close()

    run_virtual(main())


def test_running_requests_may_finish_one_by_one_before_a_publication() -> None:
    async def main() -> None:
        pool = pool_with(InTurn("0", sticks_after=6))
        generating = asyncio.create_task(pool.generate(requests(7)))
        await asyncio.sleep(10)
        waits = virtual_waits()
        publication = QuietPublication(Trainer(), pool, interrupt=False, seconds=150, waits=waits)
        publishing = asyncio.create_task(publication.publish(1))
        await asyncio.sleep(500)
        wait = waits.latest
        assert wait is not None
        assert 100 < (waits.left(wait) or 0) < 150
        with pytest.raises(DeadlineError, match=r"none did within 150 s .*progressSeconds"):
            await publishing
        assert 750 <= asyncio.get_running_loop().time() < 756, "150 s after the last one that finished"
        generating.cancel()
        await pool.close()

    run_virtual(main())


def test_a_validation_ends_as_long_after_its_last_scored_prompt_as_the_deadline_says() -> None:
    async def main() -> None:
        pool = pool_with(InTurn("0", sticks_after=3))
        prompts = [prompt(number) for number in range(9)]
        waits = virtual_waits()
        validator = Validator(
            SingleTurn(),
            pool,
            Scoring(AtOnce(), lambda texts: [""] * len(texts)),
            [HeldOut("held-out", prompts, 1, LONG)],
            seed=0,
            bootstrap=0,
            waits=waits,
            patience_seconds=150,
        )
        running = asyncio.create_task(validator.run())
        await asyncio.sleep(260)
        wait = waits.latest
        assert wait is not None
        assert wait.sentence.startswith("trainer waits for validation: 2 of 9 prompts scored")
        assert 80 < (waits.left(wait) or 0) < 100
        with pytest.raises(DeadlineError, match=r"3 of 9 prompts scored.*No prompt was scored for 150 s"):
            await running
        assert 450 <= asyncio.get_running_loop().time() < 456
        await pool.close()

    run_virtual(main())


def test_the_sentence_names_the_engine_of_the_oldest_sample_and_so_does_the_error_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        monkeypatch.setattr(members, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
        pool, waits = pool_with(InTurn("0", sticks_after=2)), virtual_waits()
        pool.add(InTurn("1"))
        pool.activate(["1"])
        pipeline = Pipeline(
            Feed(2),
            rollout_on(pool, 4),
            Trainer(),
            Schedule(ScheduleSettings(2, 2, 0)),
            after_step=go_on,
            sample_deadline_seconds=300,
            waits=waits,
        )
        running = asyncio.create_task(pipeline.run())
        await asyncio.sleep(350)
        wait = waits.latest
        assert wait is not None
        said = wait.sentence
        with pytest.raises(DeadlineError) as error:
            await running
        assert said == "trainer waits for 5/8 samples; oldest running 350 s on engine 0"
        assert "trainer waits for 6/8 samples; oldest running 700 s on engine 0. No sample" in str(error.value)
        await pool.close()

    run_virtual(main())


def test_it_is_said_why_requests_have_no_engine() -> None:
    async def main() -> None:
        pool = RolloutPool(max_outstanding=2)
        rollout = rollout_on(pool, 2)
        groups = [asyncio.create_task(rollout.run(prompt(number))) for number in range(2)]
        await asyncio.sleep(1)
        assert rollout.waiting_for(0, 2) == "0/4 samples; 4 requests wait for an engine (0 of 0 engines are serving)"
        pool.add(InTurn("0"))
        await pool.pause()
        pool.activate(["0"])
        await asyncio.sleep(1)
        assert rollout.waiting_for(0, 2) == "0/4 samples; 4 requests wait for an engine (the pool is paused)"
        pool.resume()
        await asyncio.sleep(50)
        assert rollout.waiting_for(0, 2) == (
            "0/4 samples; oldest running 0 s on engine 0; "
            "2 requests wait for an engine (1 of 1 engines are serving, all full)"
        )
        await asyncio.gather(*groups)
        await pool.close()

    run_virtual(main())


def test_groups_in_reward_functions_are_told_apart_from_those_on_engines() -> None:
    class Slow(AtOnce):
        async def score(self, group: Group) -> list[RewardResult]:
            await asyncio.sleep(1000)
            return await AtOnce().score(group)

    async def main() -> None:
        pool = pool_with(InTurn("0"))
        settings, waits = GenerationSettings(2, LONG, seed=0), virtual_waits()
        rollout = GroupRollout(
            SingleTurn(), pool, Slow(), lambda texts: [""] * len(texts), settings, waits, reward_seconds=30
        )
        groups = [asyncio.create_task(rollout.run(prompt(number))) for number in range(2)]
        await asyncio.sleep(250)
        assert rollout.waiting_for(0, 2) == (
            "2/4 samples; oldest running 0 s on engine 0; 1 group in reward functions, oldest (prompt 0) for 0 s"
            " (limit 30 s per sample)"
        )
        assert waits.beside["rollout"].sentence.startswith("rollout waits for 1 group in reward functions, oldest")
        await asyncio.sleep(200)
        assert rollout.waiting_for(0, 2) == (
            "4/4 samples; 2 groups in reward functions, oldest (prompt 0) for 0 s (limit 30 s per sample)"
        )
        await asyncio.gather(*groups)
        assert not waits.beside
        await pool.close()

    run_virtual(main())


def test_a_batch_in_order_counts_its_own_groups_and_not_those_of_the_next() -> None:
    schedule = Schedule(ScheduleSettings(2, 2, 1))
    for ordinal in range(4):
        schedule.admitted(ordinal, 0)
    for ordinal in (1, 2, 3):
        schedule.finished(ordinal)
    assert schedule.choose() is None
    assert schedule.awaited() == (1, 2)


@pytest.mark.parametrize("tells", [False, True])
def test_what_an_earlier_process_had_is_as_engines_would_make_it_now(tells: bool) -> None:
    """A stream is known of all tokens of a batch or of none: turned on, what has none is made anew; turned off, it is
    taken away."""
    count = 3
    bare = Tokens.sampled(np.zeros(count, np.int32), np.zeros(count, np.float32), np.zeros(count, np.int32))
    told = replace(bare, routed_experts=np.zeros((3, 1, 2), np.uint8), prompt_experts=np.zeros((4, 1, 2), np.uint8))
    ids = [EpisodeId("training", 0, sample) for sample in range(2)]
    turns = {id: BegunTurn(0, tokens) for id, tokens in zip(ids, (bare, told), strict=True)}

    async def main() -> dict[EpisodeId, BegunTurn]:
        settings = GenerationSettings(2, LONG, seed=0, tells_experts=tells)
        pool = pool_with(InTurn("0", sticks_after=8))
        rollout = GroupRollout(SingleTurn(), pool, AtOnce(), lambda texts: [""] * len(texts), settings)
        rollout.goes_on_from({0: turns}, {0}, 1, step=1, version=1, published_as=1)
        begun = await rollout.begun()
        await pool.close()
        return begun[0]

    kept = run_virtual(main())
    assert kept.keys() == ({ids[1]} if tells else set(ids))
    assert all((turn.tokens.routed_experts is not None) == tells for turn in kept.values())
    assert all((turn.tokens.prompt_experts is not None) == tells for turn in kept.values())
