"""The driver's handle over real Ray actors: order of results, errors that name the rank, deadlines."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rljob_trainer.driver.local_ray import ray_for_run
from rljob_trainer.errors import CheckpointError, LearnerError, StepGivenUpError
from rljob_trainer.learner.actor import RankHandle
from rljob_trainer.learner.backend import Placement, RowRules
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.group import LearnerGroup
from rljob_trainer.learner.options import GroupOptions
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch, UpdateRequest
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.learner.work import cut
from rljob_trainer.models.sharing import send_model
from rljob_trainer.storage.bucket import ObjectBucket

ONE = [Placement(0)], RowRules(1 << 20)
OPTIONS = GroupOptions(start_seconds=600, call_seconds=300)


@pytest.fixture(scope="module", autouse=True)
def _ray(forked_workers: None) -> Iterator[None]:
    with ray_for_run(cpus=4):
        yield


@pytest.fixture(scope="module")
def settings(tied_folder: Path) -> LearnerSettings:
    return LearnerSettings(
        tied_folder,
        ranks=2,
        actor=OptimizerSettings(learning_rate=1e-3),
        critic=OptimizerSettings(learning_rate=1e-3),
        reference=True,
        micro_batch_tokens=60,
    )


def process_id(rank: LearnerRank) -> int:
    return os.getpid()


def wait_until_asked(rank: LearnerRank) -> bool:
    return rank.giving_up._asked.wait(60.0)


def fail_or_wait(rank: None, number: int) -> None:
    """Rank 1 fails; rank 0 waits for it for ever, as in a collective."""
    if number == 1:
        raise ZeroDivisionError("out of cheese")
    time.sleep(600)


async def test_two_ranks_do_what_one_does_until_one_is_killed(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch], tmp_path: Path
) -> None:
    batch = make_batch()
    one = Fsdp2().start(replace(settings, ranks=1))
    share = cut(batch, [range(len(batch))], *ONE).shares[0]
    wanted = ScoreRequest(0.7, log_probs=True, entropy=True, sum_squared_probs=True, reference=True, values=True)
    group = await LearnerGroup.start(settings, OPTIONS)
    try:
        result = await group.score(batch, wanted)
        for name, stream in one.score(share, wanted).streams.items():
            np.testing.assert_allclose(getattr(result, name), stream, atol=2e-6, err_msg=name)
        assert result.final_values is not None
        assert len(result.final_values) == len(batch)

        before = await group.score(batch, ScoreRequest(0.7, log_probs=True))  # rows of values are longer
        minis = [range(0, 12), range(12, 24)] * 2
        loss = LossSettings(value_clip=0.3, entropy_coefficient=0.01)
        update = await group.update(batch, loss, minis, UpdateRequest(update_critic=True, keep_anchor=True))
        assert (update.actor_steps, update.critic_steps, update.skipped) == (4, 4, [])
        anchored = await group.score(batch, ScoreRequest(0.7, log_probs=True, anchored=True))
        np.testing.assert_array_equal(anchored.log_probs, before.log_probs)
        one.update(cut(batch, minis, *ONE).shares[0], loss, UpdateRequest(update_critic=True))
        result = await group.score(batch, wanted)
        for name, stream in one.score(share, wanted).streams.items():
            np.testing.assert_allclose(getattr(result, name), stream, atol=2e-4, err_msg=name)

        # An error that all ranks report, such as a folder without a checkpoint, does not end the group.
        with pytest.raises(CheckpointError, match=r"learner\.json is missing"):
            await group.load(tmp_path)
        pids = await group.run(process_id)

        asyncio.get_running_loop().call_later(0.3, os.kill, pids[1], signal.SIGKILL)
        began = time.monotonic()

        async def go_on() -> None:
            while True:
                await group.update(batch, loss, minis * 4)

        with pytest.raises(LearnerError, match="learner rank 1 died during update"):
            await go_on()
        assert time.monotonic() - began < OPTIONS.call_seconds / 2
        with pytest.raises(LearnerError, match="has already failed: learner rank 1 died"):
            await group.save(tmp_path)
    finally:
        await group.close()


async def test_a_step_is_given_up_by_all_ranks_when_one_is_asked(
    settings: LearnerSettings, make_batch: Callable[..., SequenceBatch], tmp_path: Path
) -> None:
    batch = make_batch()
    group = await LearnerGroup.start(settings, OPTIONS)
    try:
        working = group.run_at(1, wait_until_asked)
        await group.handles[1].give_up()
        assert await working, "it was not heard while the rank worked"
        with pytest.raises(StepGivenUpError):
            await group.update(batch, LossSettings(), [range(24)], UpdateRequest(update_critic=True))
        await group.save(tmp_path)
        assert (tmp_path / "learner.json").exists()
    finally:
        await group.close()


async def test_a_rank_that_raises_or_hangs_is_named(settings: LearnerSettings) -> None:
    """In processes without models, which is all that this needs."""
    groups = [LearnerGroup(settings, OPTIONS) for _ in range(2)]
    for group in groups:
        group.handles = [RankHandle(number, {}) for number in range(2)]

    calls = [handle.run(fail_or_wait, number) for number, handle in enumerate(groups[0].handles)]
    with pytest.raises(LearnerError, match=r"learner rank 1 failed in a test(.|\n)*out of cheese"):
        await groups[0]._gather("a test", calls, 60.0)
    with pytest.raises(LearnerError, match="has already failed: learner rank 1"):
        await groups[0].save(Path("nowhere"))

    calls = [groups[1].handles[0].run(fail_or_wait, 0)]
    with pytest.raises(
        LearnerError, match=r"learner rank 0 did not finish a test within 1 s \(deadlines\.progressSeconds\): raise"
    ):
        await groups[1]._gather("a test", calls, 1.0)


async def test_resources_that_do_not_exist(settings: LearnerSettings) -> None:
    options = GroupOptions(resources={"num_cpus": 1, "num_gpus": 64}, start_seconds=1.0)
    with pytest.raises(
        LearnerError, match=r"did not finish start \(.*64.*check that the cluster has that.*deadlines\.startSeconds"
    ):
        await LearnerGroup.start(settings, options)


def test_settings_from_a_job(tied_folder: Path, tmp_path: Path) -> None:
    from rljob_api import load_jobs, resolve

    (tmp_path / "train.jsonl").write_text('{"q": "1+1", "a": "2"}\n' * 8)
    text = f"""
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {{name: x}}
spec:
  model: {{source: {tied_folder}}}
  data:
    train: {{source: {tmp_path}/train.jsonl}}
    prompt: q
    answer: a
  reward: {{functions: [{{type: exactMatch}}]}}
  algorithm: {{preset: ppo, critic: {{warmupSteps: 2}}}}
  trainer:
    replicas: 2
    microBatchTokens: 512
    optimizer: {{learningRate: 2.0e-5, warmupSteps: 3, betas: [0.9, 0.95]}}
  stop: {{steps: 7}}
"""
    path = tmp_path / "job.yaml"
    path.write_text(text)
    job = resolve(load_jobs(path)[0])
    ours = LearnerSettings.from_job(job, tied_folder)
    assert (ours.ranks, ours.device, ours.dtype, ours.total_updates) == (2, "cpu", "float32", 7)
    assert ours.actor.learning_rate == 2e-5
    assert ours.actor.betas == (0.9, 0.95)
    assert ours.critic is not None
    assert ours.critic.warmup_steps == 3
    assert (ours.critic_warmup_updates, ours.actor_updates) == (2, 5)
    assert not ours.reference or job.spec.algorithm.needs_reference
    assert ours.micro_batch_tokens == 512


async def test_ranks_take_the_model_from_a_bucket_where_their_node_has_none(
    settings: LearnerSettings, object_store: Any, tmp_path: Path
) -> None:
    bucket = ObjectBucket(object_store.place())
    send_model(settings.model_path, bucket)
    there = tmp_path / "node" / "model"
    resources = {"num_cpus": 1, "runtime_env": {"env_vars": object_store.environment}}
    group = await LearnerGroup.start(
        replace(settings, model_path=there, model_address=bucket.address), replace(OPTIONS, resources=resources)
    )
    try:
        assert group.facts == Fsdp2().start(replace(settings, ranks=1)).facts()
    finally:
        await group.close()
    assert (there / "config.json").exists()
