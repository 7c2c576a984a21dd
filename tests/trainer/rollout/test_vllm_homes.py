"""Episodes of many turns over two vLLM engines: at home hardly anything is computed again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from tiny_mixture import mixture

from rljob_trainer.driver.local_ray import ray_for_run
from rljob_trainer.episodes.identity import EpisodeId
from rljob_trainer.episodes.requests import GenerationRequest, SamplingSettings
from rljob_trainer.pools.homes import Homes
from rljob_trainer.pools.pool import RolloutPool
from rljob_trainer.rollout.actor import EngineSpec
from rljob_trainer.rollout.handle import RayEngine

pytestmark = pytest.mark.vllm

EPISODES, TURNS, SAID, TOLD = 4, 4, 160, 10


class Misled(Homes):
    """Knows what was computed, and sends everybody to the other of two engines while it is told to."""

    misled = False

    def of(self, request: GenerationRequest) -> str | None:
        home = super().of(request)
        return {"0": "1", "1": "0"}[home] if self.misled and home is not None else home


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder = tmp_path_factory.mktemp("model")
    torch.set_num_threads(1)
    model = mixture(97)
    model.config.max_position_embeddings = 1024
    model.save_pretrained(folder)
    return EngineSpec(
        "vllm",
        str(folder),
        max_concurrent=8,
        max_context=1024,
        engine_args={"kv_cache_memory_bytes": 64 << 20, "block_size": 32},
    )


@pytest.fixture(scope="module", autouse=True)
def _ray(forked_workers: None) -> Iterator[None]:
    with ray_for_run(cpus=4):
        yield


async def episode(pool: RolloutPool, number: int) -> None:
    """A chat whose turns are begun at different times, so that engines have more and less to do."""
    context = tuple(range(1 + number, 41 + number))
    for turn in range(TURNS):
        id = EpisodeId("training", number, 0, turn)
        request = GenerationRequest(id, context, SamplingSettings(max_tokens=SAID - 7 * number), seed=number)
        (result,) = await pool.generate([request])
        context = (*context, *result.tokens.ids.tolist(), *range(3, 3 + TOLD))


@pytest.mark.slow(
    stands_for="tests/trainer/rollout/test_vllm_keep_cache.py::test_siblings_that_are_together_read_their_prompt_once"
)
async def test_at_home_hardly_anything_is_computed_again(spec: EngineSpec) -> None:
    homes = Misled()
    found = []
    # With a fixed dispatch nobody goes where there is less to do.
    async with RolloutPool(homes=homes, fixed_dispatch=True) as pool:
        for handle in await asyncio.gather(*(RayEngine.start(str(i), spec, num_cpus=0) for i in range(2))):
            pool.add(handle)
        pool.activate(["0", "1"])
        for homes.misled in (False, True):
            # None of them begins as another does: nothing of the others' is in a cache.
            numbers = range(EPISODES * homes.misled, EPISODES * (1 + homes.misled))
            await asyncio.gather(*(episode(pool, number) for number in numbers))
            found.append(homes.take_counts()["rollout/recomputed_ratio"])
    at_home, anywhere = found
    print(f"computed again for each token that was generated: {at_home:.3f} at home, {anywhere:.3f} elsewhere")
    # vLLM caches whole blocks: what stands in the last one is computed again.
    assert at_home < 0.12
    assert anywhere > 1.5 * at_home
