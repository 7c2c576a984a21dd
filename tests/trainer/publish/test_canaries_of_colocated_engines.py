"""Two real ranks with an engine beside each, whose own copy of the weights is damaged: found, and mended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rljob_trainer.driver.local_ray import ray_for_run
from rljob_trainer.learner.group import LearnerGroup
from rljob_trainer.learner.options import GroupOptions
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.publish import colocated
from rljob_trainer.publish.canaries import Canaries, GuardedPublication
from rljob_trainer.rollout.actor import EngineSpec
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import RayEngine
from rljob_trainer.waits import Waits


@pytest.fixture(scope="module", autouse=True)
def _ray(forked_workers: None) -> Iterator[None]:
    with ray_for_run(cpus=4):
        yield


def damage(rank: LearnerRank, number: int) -> None:
    """The engine beside one rank gets other weights than the learner has."""
    if rank.rank == number:
        loop = rank.attachments.get(EngineLoop)
        loop.call(lambda engine: engine.parameters["model.norm.weight"].mul_(3.0))


async def test_a_damaged_copy_is_taken_over_once_more(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=64, **shape)).save_pretrained(tmp_path)
    settings = LearnerSettings(tmp_path, ranks=2, actor=OptimizerSettings(learning_rate=1e-3), micro_batch_tokens=60)
    learner = await LearnerGroup.start(settings, GroupOptions(start_seconds=600, call_seconds=300))
    pool = RolloutPool(fixed_dispatch=True, max_outstanding=8)
    try:
        await learner.run(colocated.start_engine, EngineSpec("torch", str(tmp_path), dtype="float32", max_context=64))
        for number, handle in enumerate(learner.handles):
            pool.add(RayEngine(str(number), beside(handle), kill=lambda: None))
        publication = colocated.ColocatedPublication(learner, pool, Waits())
        said: list[str] = []
        prompts = [(1, 2, 3, 4, 5), (6, 7, 8)]
        canaries = Canaries(learner, pool, publication.resend, prompts, tolerance=0.01, seconds=60, report=said.append)
        guarded = GuardedPublication(publication, canaries)
        metrics = await guarded.publish(1)
        assert metrics["mismatch/canary/max"] < 1e-4
        assert not said

        await learner.run(damage, 1)
        metrics = await canaries.check()
        assert metrics["mismatch/canary/max"] > 0.01
        assert metrics["mismatch/canary/reloaded"] == 1
        assert "engine 1 deviates" in said[0]
        assert {engine.name for engine in pool.serving} == {"0", "1"}
        metrics = await canaries.check()
        assert metrics["mismatch/canary/max"] < 1e-4
    finally:
        await pool.close()
        await learner.close()


def beside(handle: Any) -> Any:
    return lambda method, *args: handle.run(colocated.call_engine, method, *args)
