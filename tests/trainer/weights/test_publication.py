"""From a sharded learner into engines, all of them real Ray actors: what is served is what was trained."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from rljob_trainer.driver.engines import ranks_beside
from rljob_trainer.driver.local_ray import ray_for_run
from rljob_trainer.driver.training import PipelineTrainer
from rljob_trainer.episodes.episode import Group
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.errors import EngineError, LearnerError
from rljob_trainer.learner.group import LearnerGroup
from rljob_trainer.learner.options import GroupOptions
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, ScoreResult, SequenceBatch, UpdateRequest
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.pipeline.parts import TrainedBatch
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.publish.canaries import Canaries, GuardedPublication
from rljob_trainer.publish.held_weights import HeldWeights
from rljob_trainer.publish.publication import Beside, WeightPublication
from rljob_trainer.rollout.actor import EngineSpec
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.rollout.handle import EngineHandle, RayEngine
from rljob_trainer.rollout.torch_engine import TorchEngine
from rljob_trainer.telemetry.names import check_all
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.manifest import Manifest, manifest_of

pytestmark = pytest.mark.integrity

PAIR = ((1, 2, 3), (4, 5, 6, 7, 8))


@pytest.fixture(scope="module", autouse=True)
def _ray(forked_workers: None) -> Iterator[None]:
    with ray_for_run(cpus=6):
        yield


def multiply(rank: LearnerRank, factor: float) -> None:
    """What an optimizer step is to a publication: other parameters, on every rank its share."""
    with torch.no_grad():
        for parameter in rank.actor.module.parameters():
            parameter.mul_(factor)


def keep_anchor(rank: LearnerRank) -> None:
    """What the first update of a version does before it begins."""
    rank._anchor.keep(rank.version)
    rank.version = None


def process_of(_rank: LearnerRank) -> int:
    return os.getpid()


def scores_of(folder: Path, factor: float) -> np.ndarray:
    """Log-probs of the pair by an engine in this process, with the folder's weights times ``factor``."""
    engine = TorchEngine.from_folder(folder)
    engine.begin_update()
    engine.load([(name, tensor * factor) for name, tensor in engine.parameters.items()])
    engine.finish_update(1, Manifest([]))
    return engine.score([PAIR], 1.0)[0]


async def served(engine: EngineHandle) -> np.ndarray:
    (scores,) = await engine.within(30, EngineLoop.score, [PAIR], 1.0)
    array: np.ndarray = scores
    return array


@asynccontextmanager
async def run_of(
    folder: Path, *, ranks: int, engines: int, beside: Beside | None = None, **options: Any
) -> AsyncIterator[tuple[Any, Any, Any]]:
    learner = await LearnerGroup.start(LearnerSettings(folder, ranks=ranks), GroupOptions({"num_cpus": 0}))
    try:
        async with RolloutPool(**options) as pool:
            spec = EngineSpec("torch", str(folder), max_concurrent=4)
            for handle in await asyncio.gather(*(RayEngine.start(str(i), spec, num_cpus=0) for i in range(engines))):
                pool.add(handle)
            yield learner, pool, WeightPublication(learner, pool, bucket_bytes=1 << 20, seconds=30, beside=beside)
    finally:
        await learner.close()


async def test_two_ranks_publish_to_engines_that_come_and_go(folder: Path) -> None:
    async with run_of(folder, ranks=2, engines=2) as (learner, pool, publication):
        assert pool.serving == []
        await publication.publish(1)
        assert (pool.version, len(pool.serving)) == (1, 2)
        await learner.run(multiply, 1.25)
        costs = await publication.publish(2)
        check_all(costs)
        assert 0 < costs["timing/publish_seconds/engine_pause"] <= costs["timing/publish_seconds/transfer"] + 1
        for engine in pool.engines:
            np.testing.assert_allclose(await served(engine), scores_of(folder, 1.25), atol=1e-5)
            assert (await engine.within(10, EngineLoop.status)).version == 2
        assert publication.report.nbytes == sum(t.nbytes for t in TorchEngine.from_folder(folder).parameters.values())

        late = await RayEngine.start("late", EngineSpec("torch", str(folder)), num_cpus=0)
        pool.add(late)
        await publication.bring_up(late)
        assert late in pool.serving
        np.testing.assert_allclose(await served(late), scores_of(folder, 1.25), atol=1e-5)
        await pool.remove("0")
        await learner.run(multiply, 0.8)
        await publication.publish(3)
        for engine in pool.engines:
            np.testing.assert_allclose(await served(engine), scores_of(folder, 1.0), atol=1e-5)
        assert [engine.name for engine in pool.engines] == ["1", "late"]


async def test_weights_that_changed_since_they_were_published_are_not_sent_under_their_number(folder: Path) -> None:
    async with run_of(folder, ranks=1, engines=1) as (learner, pool, publication):
        await publication.publish(1)
        published = pool.published
        assert published == manifest_of(TorchEngine.from_folder(folder).parameters.items()).version(1)
        await learner.run(multiply, 1.25)
        late = await RayEngine.start("late", EngineSpec("torch", str(folder)), num_cpus=0)
        pool.add(late)
        with pytest.raises(EngineError, match=r"weights of version 1 \(manifest \w+\) have changed .* sent again"):
            await publication.bring_up(late)
        assert late not in pool.serving
        await publication.publish(2)
        assert pool.published.number == 2
        assert pool.published.manifest_sha256 != published.manifest_sha256
        assert late in pool.serving


async def test_each_rank_hands_the_weights_to_the_engine_beside_it_also_to_the_one_that_replaces_it(
    folder: Path,
) -> None:
    async with run_of(folder, ranks=2, engines=2, beside=ranks_beside) as (learner, pool, publication):
        await learner.run(multiply, 1.25)
        await publication.publish(1)
        assert {member for link in senders(publication) for member in link.names} == {
            "the learner",
            "engine 0",
            "engine 1",
        }
        await pool.remove("1")
        replaced = await RayEngine.start("1.1", EngineSpec("torch", str(folder)), num_cpus=0)
        pool.add(replaced)
        await publication.bring_up(replaced)
        for engine in pool.serving:
            np.testing.assert_allclose(await served(engine), scores_of(folder, 1.25), atol=1e-5)
        assert [link.names for link in senders(publication)] == [("the learner", "engine 1.1")]
        await learner.run(multiply, 0.8)
        await publication.publish(2)
        for engine in pool.engines:
            np.testing.assert_allclose(await served(engine), scores_of(folder, 1.0), atol=1e-5)


def senders(publication: WeightPublication) -> list[WeightLink]:
    """The pairs of the last meeting."""
    link = publication._link
    assert link.backend == "ipc"
    return [link.seat(rank)[0] for rank in range(1, len(link.names))]


async def test_between_two_pulls_an_engine_that_joins_gets_the_weights_that_the_version_began_with(
    folder: Path,
) -> None:
    async with run_of(folder, ranks=2, engines=1) as (learner, pool, publication):
        await publication.publish(1)
        await learner.run(keep_anchor)
        await learner.run(multiply, 1.25)
        between_pulls = WeightPublication(learner, pool, bucket_bytes=1 << 20, seconds=30)
        late = await RayEngine.start("late", EngineSpec("torch", str(folder)), num_cpus=0)
        pool.add(late)
        await between_pulls.bring_up(late)
        assert late in pool.serving
        assert (await late.within(10, EngineLoop.status)).version == 1
        np.testing.assert_allclose(await served(late), scores_of(folder, 1.0), atol=1e-5)
        # The learner goes on from where it was.
        await between_pulls.publish(2)
        for engine in pool.engines:
            np.testing.assert_allclose(await served(engine), scores_of(folder, 1.25), atol=1e-5)


class Pull:
    """A training step: an update that keeps what the version began with (and has nothing to learn), and then a move of
    all weights."""

    def __init__(self, learner: LearnerGroup) -> None:
        self._learner = learner

    async def run(self, groups: Sequence[Group], *, number: int, version: int) -> TrainedBatch:
        count = len(PAIR[1])
        batch = SequenceBatch(
            token_ids=np.array([*PAIR[0], *PAIR[1]], dtype=np.int32),
            prompt_lengths=np.array([len(PAIR[0])]),
            response_lengths=np.array([count]),
            mask=np.ones(count, dtype=np.bool_),
            advantages=np.zeros(count, dtype=np.float32),
        )
        await self._learner.update(batch, LossSettings(), [[0]], UpdateRequest(keep_anchor=True))
        await self._learner.run(multiply, 1.25)
        return TrainedBatch()


class SlowToScore:
    """The learner, which scores canaries when it is allowed to."""

    def __init__(self, learner: LearnerGroup) -> None:
        self._learner = learner
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def score(self, batch: SequenceBatch, request: ScoreRequest) -> ScoreResult:
        self.asked.set()
        await self.may.wait()
        return await self._learner.score(batch, request)


async def test_who_joins_or_comes_back_while_a_publication_is_checked_gets_what_was_published(folder: Path) -> None:
    async with run_of(folder, ranks=1, engines=2) as (learner, pool, _):
        said: list[str] = []
        scorer, held = SlowToScore(learner), HeldWeights(keeps_first=True)
        publication = WeightPublication(
            learner, pool, bucket_bytes=1 << 20, seconds=30, host="127.0.0.1", holds=lambda: held.versions
        )
        canaries: Any = Canaries(
            scorer,  # type: ignore[arg-type]
            pool,
            publication.resend,
            [[*PAIR[0], *PAIR[1]]],
            tolerance=0.01,
            seconds=60,
            report=said.append,
        )
        pool.bring_up_by(publication.bring_up)
        publication.admit_by(canaries.admits)
        trainer = PipelineTrainer(Pull(learner), GuardedPublication(publication, canaries), held=held)  # type: ignore[arg-type]
        scorer.may.set()
        await trainer.publish(1)
        lent = await pool.lend(1)
        late = await RayEngine.start("late", EngineSpec("torch", str(folder)), num_cpus=0)
        await trainer.train([], step=1, version=1)

        scorer.may.clear()
        scorer.asked.clear()
        publishing = asyncio.create_task(trainer.publish(2))
        await scorer.asked.wait()
        # The one that was lent has the weights of version 1, the late one those of the folder.
        assert pool.version == 2
        lent.give_back()
        pool.add(late)
        async with asyncio.timeout(60):
            await publication.bring_up(late)
            while len(pool.serving) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for engine in pool.serving:
            assert (await engine.within(10, EngineLoop.status)).version == 2
            np.testing.assert_allclose(await served(engine), scores_of(folder, 1.25), atol=1e-5, err_msg=engine.name)
        scorer.may.set()
        assert (await publishing)["mismatch/canary/max"] < 1e-4
        assert not said


async def test_no_weights_go_out_under_a_number_that_is_not_theirs(folder: Path) -> None:
    async with run_of(folder, ranks=2, engines=1) as (_, pool, publication):
        await publication.publish(3)
        pool.version = 4  # what the driver believes
        late = await RayEngine.start("late", EngineSpec("torch", str(folder)), num_cpus=0)
        pool.add(late)
        with pytest.raises(LearnerError, match=r"was asked for the weights of version 4, but has version 3; nothing"):
            await publication.bring_up(late)
        assert late not in pool.serving
        late.kill()  # it waits for the weights until its deadline


async def test_an_engine_that_joins_serves_once_it_is_admitted(folder: Path) -> None:
    asked: list[str] = []

    async with run_of(folder, ranks=1, engines=1) as (_, pool, publication):
        await publication.publish(1)

        async def admits(engine: EngineHandle) -> bool:
            assert engine not in pool.serving
            asked.append(engine.name)
            return engine.name == "late" and len(asked) == 2

        publication.admit_by(admits)
        late = await RayEngine.start("late", EngineSpec("torch", str(folder)), num_cpus=0)
        pool.add(late)
        await publication.bring_up(late)
        assert late in pool.serving
        wrong = await RayEngine.start("wrong", EngineSpec("torch", str(folder)), num_cpus=0)
        pool.add(wrong)
        with pytest.raises(EngineError, match="engine wrong cannot join: it deviates from the trainer"):
            await publication.bring_up(wrong)
        assert asked == ["late"] * 2 + ["wrong"] * 2
        assert pool.lost == ["wrong"]


async def test_an_engine_that_died_is_left_out_and_its_successor_gets_the_weights(folder: Path) -> None:
    started: list[str] = []

    async def replace(name: str) -> EngineHandle:
        started.append(name)
        return await RayEngine.start(f"{name}b", EngineSpec("torch", str(folder)), num_cpus=0)

    async with run_of(folder, ranks=1, engines=2, replace=replace) as (learner, pool, publication):
        pool.bring_up_by(publication.bring_up)
        await publication.publish(1)
        victim = pool.engines[0]
        assert victim.place is not None
        os.kill(victim.place.process, signal.SIGKILL)
        await learner.run(multiply, 1.25)
        # Whether its death is noticed before or by the publication: nobody waits for it.
        await publication.publish(2)
        assert pool.lost == ["0"]
        assert pool.version == 2
        async with asyncio.timeout(60):
            while len(pool.serving) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert started == ["0"]
        for engine in pool.engines:
            np.testing.assert_allclose(await served(engine), scores_of(folder, 1.25), atol=1e-5)


async def test_a_sender_that_died_is_the_learners_failure_and_not_the_engines(folder: Path) -> None:
    async with run_of(folder, ranks=1, engines=2) as (learner, pool, publication):
        await publication.publish(1)
        (process,) = await learner.run(process_of)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(LearnerError, match="rank 0"):
            await publication.publish(2)
        assert len(pool.engines) == 2


async def test_no_engine_waits_for_the_store_of_a_dead_learner(folder: Path) -> None:
    async with run_of(folder, ranks=1, engines=1) as (learner, pool, _):
        publication = WeightPublication(learner, pool, bucket_bytes=1 << 20, seconds=300)
        await publication.publish(1)
        late = await RayEngine.start("late", EngineSpec("torch", str(folder)), num_cpus=0)
        pool.add(late)
        (process,) = await learner.run(process_of)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(LearnerError, match="rank 0"):
            async with asyncio.timeout(60):
                await publication.bring_up(late)


async def made_by(engine: EngineHandle, more_than: int) -> None:
    """Until an engine has made so many tokens."""
    async with asyncio.timeout(60):
        while (await engine.within(30, EngineLoop.status)).tokens_made <= more_than:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def take_time(_actor: object, seconds: float) -> None:
    """In an engine's process: each of its steps takes so long, whoever else has the processors; 0: as it is."""
    patch.stopall()
    if seconds:
        step = TorchEngine.step

        def slow(engine: TorchEngine) -> list[GenerationResult]:
            time.sleep(seconds)
            return step(engine)

        patch.object(TorchEngine, "step", slow).start()


async def slowed(engine: RayEngine, seconds: float) -> None:
    await engine._answer("__ray_call__", 30, take_time, seconds)


async def test_finished_siblings_stay_as_they_are_when_the_others_are_interrupted(folder: Path) -> None:
    async with run_of(folder, ranks=1, engines=1) as (learner, pool, publication):
        await publication.publish(1)
        lengths = (3, 250, 250, 2)
        requests = [
            GenerationRequest(EpisodeId("a", i, 0), (1, 2, 3), SamplingSettings(max_tokens=length), seed=i)
            for i, length in enumerate(lengths)
        ]
        await slowed(pool.engines[0], 0.05)  # 250 tokens: 12 s
        running = asyncio.create_task(pool.generate(requests))
        await made_by(pool.engines[0], 20)
        await pool.pause(interrupt=True)
        await slowed(pool.engines[0], 0)
        begun = {request.id.ordinal: request.begun.ids.tolist() for request in await pool.begun()}
        await learner.run(multiply, 1.25)
        await publication.publish(2)
        pool.resume()
        results = await running
        for result, length in zip(results, lengths, strict=True):
            had = begun[result.id.ordinal]
            assert result.tokens.ids.tolist()[: len(had)] == had
            assert result.tokens.versions.tolist() == [1] * len(had) + [2] * (length - len(had))
        assert [len(begun[name]) for name in (0, 3)] == [3, 2]
        assert (await pool.status())[0].tokens_made == sum(lengths)


async def test_a_held_engine_s_tokens_of_the_version_before_are_kept(folder: Path) -> None:
    async with run_of(folder, ranks=1, engines=1) as (_, pool, publication):
        await publication.publish(1)
        requests = [
            GenerationRequest(EpisodeId("a", i, 0), (1, 2, 3), SamplingSettings(max_tokens=250), seed=i)
            for i in range(8)
        ]
        await slowed(pool.engines[0], 0.05)  # none is done before the engine is held
        running = asyncio.create_task(pool.generate(requests))
        await made_by(pool.engines[0], 20)
        await pool.pause(interrupt=True)
        before = {request.id.ordinal: len(request.begun) for request in await pool.begun()}
        await publication.publish(2)
        pool.resume()
        await made_by(pool.engines[0], sum(before.values()) + 20)
        await pool.hold("0")
        after = {request.id.ordinal: len(request.begun) for request in await pool.begun()}
        assert after == before
        await slowed(pool.engines[0], 0)
        pool.activate(["0"])
        for result in await running:
            had = before[result.id.ordinal]
            assert result.tokens.versions.tolist() == [1] * had + [2] * (250 - had)


async def test_requests_that_run_across_a_publication_carry_both_versions(folder: Path) -> None:
    """Far more requests than a publication takes. Those that run together end at different times, so that it meets some
    of them half-way."""
    lengths = (250, 190, 130, 70) * 500
    requests = [
        GenerationRequest(EpisodeId("a", i, 0), (1, 2, 3), SamplingSettings(max_tokens=length), seed=i)
        for i, length in enumerate(lengths)
    ]
    versions: list[np.ndarray] = []
    async with run_of(folder, ranks=1, engines=1) as (learner, pool, publication):
        await publication.publish(1)
        running = asyncio.create_task(
            pool.generate(requests, lambda _, result: versions.append(result.tokens.versions))
        )
        await made_by(pool.engines[0], 20)
        await learner.run(multiply, 1.25)
        await publication.publish(2)
        # One that the publication has met may end after one that came later: who goes on first is the pool's affair.
        awaited = {(1, 2), (2,)}
        async with asyncio.timeout(60):
            while awaited - {tuple(np.unique(made).tolist()) for made in versions}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert all((np.diff(made) >= 0).all() for made in versions)
