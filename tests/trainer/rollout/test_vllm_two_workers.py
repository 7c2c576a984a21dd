"""An engine over two workers (tensor parallelism): each takes its own part of what is published, and together they are
exactly the model. On GPUs the same code runs with another backend's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from small_episodes import named
from transformers import PreTrainedModel

from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.errors import EngineError
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.manifest import Manifest
from rljob_trainer.weights.plan import describe
from rljob_trainer.weights.sender import Publisher

if TYPE_CHECKING:
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

pytestmark = pytest.mark.vllm
PROMPTS = [(5, 6, 7), (9,), (1, 2, 3, 4, 5, 6, 7, 8)]
LENGTH = 24
WORKERS = ("the learner", "engine 0, worker 0", "engine 0, worker 1")


@pytest.fixture(scope="module")
def engine(llama_folder: Path) -> Iterator[VLLMEngine]:
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

    arguments = {"kv_cache_memory_bytes": 32 << 20}
    engine = VLLMEngine(llama_folder, max_concurrent=8, max_context=200, tensor_parallel=2, engine_args=arguments)
    yield engine
    engine.close()


def ask(index: int, temperature: float = 1.0) -> GenerationRequest:
    return GenerationRequest(
        named(str(index)), PROMPTS[index], SamplingSettings(temperature, 1.0, 0, LENGTH, ()), seed=index
    )


def finished(engine: VLLMEngine) -> dict[int, GenerationResult]:
    results = {}
    while engine.has_work:
        results |= {int(result.id.purpose): result for result in engine.step()}
    return results


@pytest.mark.slow(stands_for="tests/trainer/rollout/test_vllm_engine.py::test_weights_arrive_through_a_broadcast")
def test_both_workers_take_what_is_published_and_compute_the_new_model_together(
    engine: VLLMEngine,
    llama: PreTrainedModel,
    make_model: Callable[..., PreTrainedModel],
    log_probs_of: Callable[..., np.ndarray],
) -> None:
    assert engine.weight_ranks == 2
    new = make_model("llama", seed=6)
    for index in range(len(PROMPTS)):
        engine.add(ask(index))
    for _ in range(8):
        engine.step()
    publisher = Publisher(1 << 16, "127.0.0.1")
    link = WeightLink(publisher.address, 1, WORKERS)
    named = dict(new.named_parameters())
    with ThreadPoolExecutor(1) as sender:
        connected = sender.submit(publisher.connect, link, 60)
        engine.join_weights(link, 1, 60)
        connected.result(60)
        sent = sender.submit(publisher.publish, describe(named.items()), named.items(), 4, 60)
        report = engine.receive_weights(4, 60)
        assert sent.result(60).nbytes == report.nbytes == sum(tensor.nbytes for tensor in named.values())
    results = finished(engine)
    for index, prompt in enumerate(PROMPTS):
        result = results[index]
        response = tuple(result.tokens.ids.tolist())
        split = int(np.searchsorted(result.tokens.versions, 4))
        assert 4 < split < 12
        assert result.tokens.versions.tolist() == [0] * split + [4] * (LENGTH - split)
        before, after = log_probs_of(llama, prompt, response), log_probs_of(new, prompt, response)
        np.testing.assert_allclose(result.tokens.log_probs[:split], before[:split], atol=1e-5)
        np.testing.assert_allclose(result.tokens.log_probs[split:], after[split:], atol=1e-5)
        np.testing.assert_allclose(
            engine.score([(prompt, response)], 0.7)[0], log_probs_of(new, prompt, response, 0.7), atol=1e-5
        )


@pytest.mark.slow(stands_for="tests/trainer/rollout/test_vllm_engine.py::test_weights_arrive_through_a_broadcast")
def test_each_worker_may_have_a_sender_of_its_own(
    engine: VLLMEngine,
    make_model: Callable[..., PreTrainedModel],
    log_probs_of: Callable[..., np.ndarray],
) -> None:
    """As where workers share their devices with learner ranks; here they share the host's memory."""
    new = make_model("llama", seed=7)
    named = dict(new.named_parameters())
    publishers = [Publisher(1 << 16, "127.0.0.1") for _ in range(2)]
    addresses = tuple(publisher.address for publisher in publishers)
    link = WeightLink(addresses[0], 2, WORKERS, "ipc", senders=addresses)
    with ThreadPoolExecutor(2) as ranks:
        connected = [ranks.submit(p.connect, link.seat(worker + 1)[0], 60) for worker, p in enumerate(publishers)]
        engine.join_weights(link, 1, 60)
        for connecting in connected:
            connecting.result(60)
        sent = [ranks.submit(p.publish, describe(named.items()), named.items(), 5, 60) for p in publishers]
        engine.receive_weights(5, 60)
        assert engine.manifest is not None
        assert [sending.result(60).version for sending in sent] == [engine.manifest.version(5)] * 2
    pair = (PROMPTS[0], (3, 1, 4, 1, 5))
    np.testing.assert_allclose(engine.score([pair], 1.0)[0], log_probs_of(new, *pair), atol=1e-5)


@pytest.mark.slow(stands_for="tests/trainer/rollout/test_vllm_engine.py::test_weights_arrive_through_a_broadcast")
def test_tensors_of_this_process_do_not_reach_them(engine: VLLMEngine, llama: PreTrainedModel) -> None:
    engine.begin_update()
    with pytest.raises(EngineError, match=r"cannot reach workers in other processes; use receive_weights\(\)"):
        engine.load(llama.named_parameters())
    with pytest.raises(EngineError, match=r"lacks \d+ parameters, first"):
        engine.finish_update(engine.version, Manifest([]))
