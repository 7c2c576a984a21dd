"""What is scored in processes is scored as it finishes: no sample waits for its siblings; in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from in_turn import LONG, InTurn, pool_with

from rljob_trainer.episodes.episode import Group, Prompt, RewardResult
from rljob_trainer.episodes.group import GREEDY_INDEX, GenerationSettings, GroupRollout
from rljob_trainer.episodes.single_turn import SingleTurn
from rljob_trainer.errors import RewardError
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.simulation.clock import run_virtual

PROMPT = Prompt(7, 0, 7, "test", "", (1,), None)
SECONDS = 50.0


class Rewards:
    """Fifty seconds a call, in processes or not; the score is the sample's position. Fails on sample ``bad``."""

    def __init__(self, *, elsewhere: bool, bad: int | None = None) -> None:
        self.calls: list[tuple[float, list[int]]] = []
        """When, and which samples."""
        self._elsewhere, self._bad = elsewhere, bad

    def in_processes(self, source: str) -> bool:
        return self._elsewhere

    async def score(self, group: Group) -> list[RewardResult]:
        self.calls.append((asyncio.get_running_loop().time(), [episode.id.sample for episode in group.episodes]))
        await asyncio.sleep(SECONDS)
        if self._bad in self.calls[-1][1]:
            raise RewardError(f"sample {self._bad} cannot be scored")
        return [RewardResult(float(episode.id.sample)) for episode in group.episodes]


def rollout_with(rewards: Rewards, pool: RolloutPool, *, greedy: bool = False) -> GroupRollout:
    settings = GenerationSettings(3, LONG, seed=0, greedy=greedy)
    return GroupRollout(SingleTurn(), pool, rewards, lambda texts: [""] * len(texts), settings)


@pytest.mark.parametrize(
    ("elsewhere", "calls", "seconds"),
    [(True, [(100.0, [0]), (200.0, [1]), (300.0, [2])], 350.0), (False, [(300.0, [0, 1, 2])], 350.0)],
)
def test_samples_are_scored_while_their_siblings_run(
    elsewhere: bool, calls: list[tuple[float, list[int]]], seconds: float
) -> None:
    async def main() -> None:
        rewards, pool = Rewards(elsewhere=elsewhere), pool_with(InTurn("0"))
        group = await rollout_with(rewards, pool).run(PROMPT)
        assert [(round(at), which) for at, which in rewards.calls] == calls
        assert round(asyncio.get_running_loop().time()) == seconds
        assert [(e.id.sample, e.reward.score) for e in group.episodes if e.reward] == [(0, 0.0), (1, 1.0), (2, 2.0)]
        await pool.close()

    run_virtual(main())


def test_the_greedy_response_is_scored_like_the_others() -> None:
    async def main() -> None:
        rewards, pool = Rewards(elsewhere=True), pool_with(InTurn("0"))
        group = await rollout_with(rewards, pool, greedy=True).run(PROMPT)
        assert [which for _, which in rewards.calls] == [[0], [1], [2], [GREEDY_INDEX]]
        assert (len(group.episodes), group.greedy_score) == (3, GREEDY_INDEX)
        await pool.close()

    run_virtual(main())


def test_samples_that_finish_in_one_moment_are_scored_together() -> None:
    async def main() -> None:
        rewards, pool = Rewards(elsewhere=True), pool_with(InTurn("0", seconds=0.0))
        group = await rollout_with(rewards, pool).run(PROMPT)
        assert [which for _, which in rewards.calls] == [[0, 1, 2]]
        assert [episode.reward.score for episode in group.episodes if episode.reward] == [0.0, 1.0, 2.0]
        await pool.close()

    run_virtual(main())


def test_a_sample_that_cannot_be_scored_ends_its_siblings_at_once() -> None:
    async def main() -> None:
        rewards, pool = Rewards(elsewhere=True, bad=0), pool_with(InTurn("0"))
        with pytest.raises(RewardError, match="sample 0 cannot be scored"):
            await rollout_with(rewards, pool).run(PROMPT)
        assert round(asyncio.get_running_loop().time()) == 150
        await asyncio.sleep(1)
        assert not pool.progress()
        assert [standing.running for standing in pool.standings()] == [0]
        await pool.close()

    run_virtual(main())


def test_a_group_that_is_given_up_leaves_nothing_behind() -> None:
    async def main() -> None:
        rewards, pool = Rewards(elsewhere=True), pool_with(InTurn("0"))
        running = asyncio.create_task(rollout_with(rewards, pool).run(PROMPT))
        await asyncio.sleep(220)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(1)
        assert [standing.running for standing in pool.standings()] == [0]
        await pool.close()
        left = {task.get_name() for task in asyncio.all_tasks()} - {asyncio.current_task().get_name()}  # type: ignore[union-attr]
        assert not left

    run_virtual(main())
