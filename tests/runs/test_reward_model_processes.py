"""Reward models in processes of their own, which import torch and transformers: started, lost, and not to be had."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from reward_models import alone, made, pool, responses, reward, texts

from rljob_trainer.errors import JobFileError, RewardError
from rljob_trainer.telemetry.names import check_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("models") / "plain")


async def test_scores_through_the_processes(folder: Path) -> None:
    said = texts(30)
    async with pool(reward(folder, workers=2, batchTokens=256)) as opened:
        assert opened.in_processes("s")
        results = await asyncio.gather(*(opened.score_responses([r]) for r in responses(*said)))
        counts = opened.take_counts()
        with pytest.raises(RewardError, match=r"sample 1: prompt and response have 66 tokens .* more than its 64"):
            await opened.score_responses(responses("a", "b" * 60))
    assert [result.score for (result,) in results] == pytest.approx(
        [alone(folder, f"what={t}") for t in said], abs=1e-5
    )
    check_all(counts)
    assert counts["reward_model/rewardModel/rows"] == 30
    assert counts["reward_model/rewardModel/tokens"] == sum(6 + len(text) for text in said)
    assert counts["reward_model/rewardModel/seconds"] > 0


def scoring_process() -> psutil.Process:
    """The one of the model: those that ran other tests here may have children of their own."""
    (found,) = (
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "rljob_trainer.rewards.reward_model.worker" in child.cmdline()
    )
    return found


async def test_a_process_that_is_lost_is_replaced(folder: Path) -> None:
    async with pool(reward(folder)) as opened:
        child = scoring_process()
        os.kill(child.pid, signal.SIGKILL)
        (result,) = await opened.score_responses(responses("abc"))
        # Stopped, so that it is at work when it is lost.
        child = scoring_process()
        child.suspend()
        scoring = asyncio.create_task(opened.score_responses(responses("abcd")))
        await asyncio.sleep(0.05)
        child.kill()
        (other,) = await scoring
    assert result.score == pytest.approx(alone(folder, "what=abc"), abs=1e-5)
    assert other.score == pytest.approx(alone(folder, "what=abcd"), abs=1e-5)


async def test_what_is_no_reward_model_is_said_by_its_process(tmp_path: Path) -> None:
    for folder, problem in (
        (made(tmp_path / "language", labels=0), "no weights for score.weight: it is a language model"),
        (tmp_path / "a" / "b" / "c", "there is no folder"),
    ):
        with pytest.raises(JobFileError, match=rf"functions\[0\].rewardModel.source: .*{problem}"):
            async with pool(reward(folder), tmp_path):
                pass
    assert not (tmp_path / "reward_models.json").exists()
