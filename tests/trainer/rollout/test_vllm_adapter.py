"""vLLM is given adapters alone: it computes with the one that was sent last, and the learner says the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from slow_core import slow
from small_episodes import named
from transformers import AutoModelForCausalLM, PreTrainedModel

from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.errors import EngineError
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings, LoraSettings
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.manifest import manifest_of
from rljob_trainer.weights.plan import describe
from rljob_trainer.weights.sender import Publisher

if TYPE_CHECKING:
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

pytestmark = pytest.mark.vllm

LogProbsOf = Callable[..., np.ndarray]
PROMPTS = [(5, 6, 7), (9,), tuple(range(1, 40))]
LORA = LoraSettings(rank=6, alpha=12, publish="adapter")


@pytest.fixture(scope="module")
def rank(llama_folder: Path) -> LearnerRank:
    return Fsdp2().start(LearnerSettings(llama_folder, lora=LORA))


IN_ITS_OWN_PROCESS = pytest.param(True, marks=pytest.mark.slow(stands_for="[core here]"))


@pytest.fixture(scope="module", params=[False, IN_ITS_OWN_PROCESS], ids=["core here", "core in its own process"])
def engine(llama_folder: Path, request: pytest.FixtureRequest) -> Iterator[VLLMEngine]:
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

    arguments = {"kv_cache_memory_bytes": 32 << 20}
    engine = VLLMEngine(
        llama_folder,
        max_concurrent=8,
        max_context=200,
        keep_cache=True,
        adapter_rank=LORA.rank,
        own_process=request.param,
        engine_args=arguments,
    )
    yield engine
    engine.close()


def drawn(rank: LearnerRank, seed: int, folder: Path) -> PreTrainedModel:
    """Another adapter, and the model that it makes, as transformers reads it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in rank.actor.parameters():
            if ".lora_B." in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    rank.export(folder / str(seed))
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder / str(seed), dtype=torch.float32)
    return model


def publish(rank: LearnerRank, engine: VLLMEngine, version: int) -> int:
    """Returns how many bytes it took."""
    tensors = list(rank.named_parameters_for_publish())
    if engine.takes_tensors:
        engine.begin_update()
        engine.load(tensors[:5])
        engine.load(tensors[5:])
        engine.finish_update(version, manifest_of(tensors))
    else:
        publisher = Publisher(1 << 16, "127.0.0.1")
        link = WeightLink(publisher.address, version, ("the learner", "engine 0"))
        with ThreadPoolExecutor(1) as sender:
            connected = sender.submit(publisher.connect, link, 30)
            engine.join_weights(link, 1, 30)
            connected.result(30)
            sent = sender.submit(publisher.publish, describe(tensors), tensors, version, 30)
            engine.receive_weights(version, 30)
            sent.result(30)
    return sum(tensor.nbytes for _, tensor in tensors)


def ask(name: str, prompt: tuple[int, ...], length: int = 20) -> GenerationRequest:
    return GenerationRequest(named(name), prompt, SamplingSettings(1.0, 1.0, 0, length, ()), 3)


def run(engine: VLLMEngine) -> dict[str, GenerationResult]:
    results: dict[str, GenerationResult] = {}
    while engine.has_work:
        results.update((result.id.purpose, result) for result in engine.step())
    return results


def test_each_version_is_computed_with_its_own_adapter(
    rank: LearnerRank, engine: VLLMEngine, log_probs_of: LogProbsOf, tmp_path: Path
) -> None:
    size = sum(p.numel() * 4 for p in rank.actor.module.parameters() if not p.requires_grad)
    before, held = None, set()
    for version, seed in ((1, 11), (2, 12), (3, 13)):
        model = drawn(rank, seed, tmp_path)
        assert publish(rank, engine, version) < size / 2
        for number, prompt in enumerate(PROMPTS):
            engine.add(ask(str(number), prompt))
        results, pairs = run(engine), []
        for number, prompt in enumerate(PROMPTS):
            tokens = results[str(number)].tokens
            assert set(tokens.versions.tolist()) == {version}
            response = tuple(tokens.ids.tolist())
            np.testing.assert_allclose(tokens.log_probs, log_probs_of(model, prompt, response, 1.0), atol=1e-5)
            if before is not None:
                assert np.abs(log_probs_of(before, prompt, response, 1.0) - tokens.log_probs).max() > 0.01
            pairs.append((prompt, response))
        for temperature in (1.0, 0.7):  # how canaries are scored
            for pair, scores in zip(pairs, engine.score(pairs, temperature), strict=True):
                np.testing.assert_allclose(scores, log_probs_of(model, *pair, temperature), atol=1e-5)
        resident = engine.resident()
        assert resident is not None
        held.add(tuple(sorted(resident.sums.items())))
        before = model
    assert len(held) == 3  # the fingerprint sees the adapter


def test_what_is_cached_under_one_adapter_is_not_met_under_the_next(
    rank: LearnerRank, engine: VLLMEngine, log_probs_of: LogProbsOf, tmp_path: Path
) -> None:
    """Requests that run across an update go on with the keys and values they have; later ones begin anew."""
    prompt = tuple(range(1, 90))
    drawn(rank, 21, tmp_path)
    publish(rank, engine, 4)
    before = engine.tokens_made
    model = drawn(rank, 22, tmp_path)
    # In its own process the core runs on between two steps.
    with slow(engine.core):
        engine.add(ask("long", prompt, length=40 if engine.takes_tensors else 110))
        while engine.tokens_made < before + 5:
            engine.step()
        publish(rank, engine, 5)
    engine.add(ask("later", prompt))
    results = run(engine)
    assert set(results["long"].tokens.versions.tolist()) == {4, 5}
    later = results["later"].tokens
    assert set(later.versions.tolist()) == {5}
    expected = log_probs_of(model, prompt, tuple(later.ids.tolist()), 1.0)
    np.testing.assert_allclose(later.log_probs, expected, atol=1e-5)


def test_an_adapter_to_another_base_is_refused(
    rank: LearnerRank, engine: VLLMEngine, llama: PreTrainedModel, tmp_path: Path
) -> None:
    with torch.no_grad():
        llama.model.norm.weight[0] += 1e-3
    llama.save_pretrained(tmp_path)
    with torch.no_grad():
        llama.model.norm.weight[0] -= 1e-3
    other = Fsdp2().start(LearnerSettings(tmp_path, lora=LORA))
    with pytest.raises(EngineError, match=r"belongs to the base [0-9a-f]{12}, but the engine has read [0-9a-f]{12}"):
        publish(other, engine, 6)
    assert engine.manifest is None
    publish(rank, engine, 7)
