"""vLLM behind the engine protocol, held against transformers and the torch engine's conventions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from cut_for import cut_for
from slow_core import slow
from small_episodes import named
from transformers import PreTrainedModel

from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings, continued
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.errors import EngineError
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.protocol import ScoreRequest, SequenceBatch
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.manifest import Manifest, manifest_of
from rljob_trainer.weights.plan import describe
from rljob_trainer.weights.residence import differing
from rljob_trainer.weights.sender import Publisher

if TYPE_CHECKING:
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

pytestmark = pytest.mark.vllm

MakeModel = Callable[..., PreTrainedModel]
LogProbsOf = Callable[..., np.ndarray]
PROMPTS = [(5, 6, 7), (9,), (1, 2, 3, 4, 5, 6, 7, 8), (30, 31)]


IN_ITS_OWN_PROCESS = pytest.param(True, marks=pytest.mark.slow(stands_for="[core here]"))


@pytest.fixture(scope="module", params=[False, IN_ITS_OWN_PROCESS], ids=["core here", "core in its own process"])
def engine_of_module(llama_folder: Path, request: pytest.FixtureRequest) -> Iterator[VLLMEngine]:
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

    # As few tokens a step as vLLM takes: two long prompts at once are too many.
    arguments = {"kv_cache_memory_bytes": 32 << 20, "max_num_batched_tokens": 200}
    engine = VLLMEngine(
        llama_folder, max_concurrent=8, max_context=200, own_process=request.param, engine_args=arguments
    )
    yield engine
    engine.close()


core_here = pytest.mark.parametrize("engine_of_module", [False], indirect=True, ids=["core here"])
"""For what looks into the core, or is of engines whose core is here."""


@pytest.fixture
def engine(engine_of_module: VLLMEngine, llama: PreTrainedModel) -> VLLMEngine:
    """The module's engine, idle and with the weights of ``llama`` as version 0."""
    engine_of_module.abort()
    if engine_of_module.version != 0:
        update(engine_of_module, llama, 0)
    return engine_of_module


def update(engine: VLLMEngine, model: PreTrainedModel, version: int) -> None:
    if not engine.takes_tensors:
        broadcast(engine, model, version)
        return
    engine.begin_update()
    named = list(model.named_parameters())
    # In two parts that tear a layer's fused matrices apart.
    engine.load(named[:4])
    engine.load(named[4:])
    engine.finish_update(version, Manifest([]))


def broadcast(engine: VLLMEngine, model: PreTrainedModel, version: int) -> None:
    publisher = Publisher(1 << 16, "127.0.0.1")
    link = WeightLink(publisher.address, version + 1, ("the learner", "engine 0"))
    named = dict(model.named_parameters())
    with ThreadPoolExecutor(1) as sender:
        connected = sender.submit(publisher.connect, link, 30)
        engine.join_weights(link, 1, 30)
        connected.result(30)
        sent = sender.submit(publisher.publish, describe(named.items()), named.items(), version, 30)
        engine.receive_weights(version, 30)
        sent.result(30)


def ask(
    name: str,
    prompt: tuple[int, ...] = PROMPTS[0],
    *,
    seed: int = 0,
    length: int = 20,
    temperature: float = 1.0,
    stop: tuple[int, ...] = (),
    top_k: int = 0,
    top_p: float = 1.0,
) -> GenerationRequest:
    return GenerationRequest(named(name), prompt, SamplingSettings(temperature, top_p, top_k, length, stop), seed)


def run(engine: VLLMEngine, *requests: GenerationRequest) -> dict[str, GenerationResult]:
    for request in requests:
        engine.add(request)
    results: dict[str, GenerationResult] = {}
    while engine.has_work:
        results.update((result.id.purpose, result) for result in engine.step())
    return results


def test_log_probs_equal_a_float32_forward_pass_at_the_sampling_temperature(
    engine: VLLMEngine, llama: PreTrainedModel, log_probs_of: LogProbsOf
) -> None:
    temperatures = [1.0, 0.7, 1.6, 0.0]
    # More requests than it may run at once.
    requests = [
        ask(f"{p}-{i}", prompt, seed=10 * p + i, temperature=temperatures[i])
        for p, prompt in enumerate(PROMPTS)
        for i in range(4)
    ]
    results = run(engine, *requests)
    pairs = []
    for request in requests:
        result = results[request.id.purpose]
        response = tuple(result.tokens.ids.tolist())
        expected = log_probs_of(llama, request.prompt_ids, response, request.sampling.temperature or 1.0)
        np.testing.assert_allclose(result.tokens.log_probs, expected, atol=1e-4)
        assert (len(response), result.finish, set(result.tokens.versions.tolist())) == (20, "length", {0})
        pairs.append((request.prompt_ids, response))
    for temperature in (1.0, 0.7):
        for pair, scores in zip(pairs, engine.score(pairs, temperature), strict=True):
            np.testing.assert_allclose(scores, log_probs_of(llama, *pair, temperature), atol=1e-4)


def test_prompts_that_are_too_many_for_one_step_are_begun_in_several(
    engine: VLLMEngine, llama: PreTrainedModel, log_probs_of: LogProbsOf
) -> None:
    """A part of a prompt would draw a token that does not count, and generators of the CPU cannot be set back."""
    prompts = [tuple((i * step) % 90 + 1 for i in range(150)) for step in (3, 5, 7)]
    results = run(engine, *(ask(str(i), prompt, seed=i) for i, prompt in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        response = tuple(results[str(i)].tokens.ids.tolist())
        alone = run(engine, ask("alone", prompt, seed=i))["alone"]
        assert response == tuple(alone.tokens.ids.tolist())
        np.testing.assert_allclose(
            results[str(i)].tokens.log_probs, log_probs_of(llama, prompt, response, 1.0), atol=1e-4
        )


def test_the_learner_gives_what_was_sampled_the_log_probs_that_the_engine_reports(
    engine: VLLMEngine, llama_folder: Path
) -> None:
    """By the way that training scores: packed rows, prompts shared by their samples, the vocabulary in chunks."""
    requests = [
        ask(f"{p}-{i}", prompt, seed=10 * p + i, length=40 + 10 * i, temperature=0.7)
        for p, prompt in enumerate((*PROMPTS, tuple(range(60))))
        for i in range(3)
    ]
    sampled = run(engine, *requests)
    results = [sampled[request.id.purpose] for request in requests]
    pieces = [np.array(ids) for q, r in zip(requests, results, strict=True) for ids in (q.prompt_ids, r.tokens.ids)]
    engines_own = np.concatenate([result.tokens.log_probs for result in results])
    batch = SequenceBatch(
        token_ids=np.concatenate(pieces).astype(np.int32),
        prompt_lengths=np.array([len(request.prompt_ids) for request in requests]),
        response_lengths=np.array([len(result.tokens.ids) for result in results]),
        mask=np.ones(len(engines_own), dtype=np.bool_),
    )
    rank = Fsdp2().start(LearnerSettings(llama_folder, micro_batch_tokens=256, log_prob_chunk_tokens=32))
    work = cut_for(batch, [range(len(batch))], ranks=1, token_budget=256)
    assert len(work.shares[0].micro_batches[0]) > 1
    scores = work.merge(batch, [rank.score(work.shares[0], ScoreRequest(0.7, log_probs=True)).streams["log_probs"]])
    np.testing.assert_allclose(scores, engines_own, rtol=0, atol=1e-4)
    # At another temperature they are others.
    others = work.merge(batch, [rank.score(work.shares[0], ScoreRequest(log_probs=True)).streams["log_probs"]])
    assert np.abs(others - engines_own).max() > 0.1


def test_greedy_equals_transformers_token_for_token(engine: VLLMEngine, llama: PreTrainedModel) -> None:
    results = run(engine, *(ask(str(i), prompt, temperature=0) for i, prompt in enumerate(PROMPTS)))
    for i, prompt in enumerate(PROMPTS):
        expected: torch.Tensor = llama.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)  # type: ignore[operator]
        assert results[str(i)].tokens.ids.tolist() == expected[0, len(prompt) :].tolist()


def test_seeds_repeat_and_differ(engine: VLLMEngine) -> None:
    requests = [ask(str(i), seed=i % 4) for i in range(8)]
    results = run(engine, *requests)
    first = [results[str(i)].tokens.ids.tolist() for i in range(8)]
    assert first[:4] == first[4:]
    assert len({tuple(tokens) for tokens in first}) == 4
    alone = run(engine, ask("alone", seed=2))["alone"]
    assert alone.tokens.ids.tolist() == first[2]


def test_a_response_ends_with_its_first_stop_token(engine: VLLMEngine) -> None:
    tokens = run(engine, ask("free", seed=5))["free"].tokens.ids.tolist()
    stop = tokens[7]
    result = run(engine, ask("stopped", seed=5, stop=(stop, 10**6)))["stopped"]
    assert result.tokens.ids.tolist() == tokens[: tokens.index(stop) + 1]
    assert result.finish == "stop"


def test_top_k_and_top_p_report_the_distribution_that_was_drawn_from(
    engine: VLLMEngine, llama: PreTrainedModel
) -> None:
    with torch.no_grad():
        probabilities = llama(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    kept = probabilities.topk(4).indices.tolist()
    for result in run(engine, *(ask(str(i), seed=i, length=1, top_k=4) for i in range(40))).values():
        token = int(result.tokens.ids[0])
        assert token in kept
        expected = float((probabilities[token] / probabilities[kept].sum()).log())
        assert result.tokens.log_probs[0] == pytest.approx(expected, abs=1e-4)


def test_an_update_makes_it_exactly_the_new_model_also_for_running_requests(
    engine: VLLMEngine, llama: PreTrainedModel, make_model: MakeModel, log_probs_of: LogProbsOf
) -> None:
    new = make_model("llama", seed=5)
    # In its own process the core runs on between two steps.
    length, before = 40 if engine.takes_tensors else 180, engine.tokens_made
    with slow(engine.core):
        for i, prompt in enumerate(PROMPTS):
            engine.add(ask(str(i), prompt, seed=i, length=length))
        while engine.tokens_made < before + 5 * len(PROMPTS):
            assert engine.step() == []
        engine.begin_update()
    so_far = {i: engine._tokens_inside(str(named(str(i)))) for i in range(len(PROMPTS))}
    assert all(4 < count < length for count in so_far.values())
    with pytest.raises(EngineError, match="finish_update"):
        engine.step()
    update(engine, new, 3)
    assert engine.version == 3
    results = run(engine)
    for i, prompt in enumerate(PROMPTS):
        result = results[str(i)]
        split = so_far[i]
        assert result.tokens.versions.tolist() == [0] * split + [3] * (length - split)
        response = tuple(result.tokens.ids.tolist())
        np.testing.assert_allclose(
            result.tokens.log_probs[:split], log_probs_of(llama, prompt, response)[:split], atol=1e-4
        )
        np.testing.assert_allclose(
            result.tokens.log_probs[split:], log_probs_of(new, prompt, response)[split:], atol=1e-4
        )
    # The same prompts again: no key or value of the old weights may be met.
    for i, prompt in enumerate(PROMPTS):
        result = run(engine, ask("again", prompt, seed=i))["again"]
        expected = log_probs_of(new, prompt, tuple(result.tokens.ids.tolist()))
        np.testing.assert_allclose(result.tokens.log_probs, expected, atol=1e-4)


def test_interrupted_siblings_of_a_finished_one_go_on_under_new_weights_from_the_tokens_they_have(
    engine: VLLMEngine, llama: PreTrainedModel, make_model: MakeModel, log_probs_of: LogProbsOf
) -> None:
    """``partialRollout: recompute``, as the pool does it."""
    new = make_model("llama", seed=5)
    requests = {str(i): ask(str(i), seed=i, length=4 if i < 2 else 30) for i in range(4)}
    for request in requests.values():
        engine.add(request)
    results: dict[str, GenerationResult] = {}
    for _ in range(8):
        results.update((result.id.purpose, result) for result in engine.step())
    assert set(results) == {"0", "1"}
    partials = {partial.id.purpose: partial for partial in engine.abort()}
    assert set(partials) == {"2", "3"}
    update(engine, new, 4)
    results |= run(engine, *(continued(requests[name], partial) for name, partial in partials.items()))
    for name, request in requests.items():
        result, response = results[name], tuple(results[name].tokens.ids.tolist())
        split = len(partials[name].tokens.ids) if name in partials else len(response)
        assert result.tokens.versions.tolist() == [0] * split + [4] * (request.sampling.max_tokens - split)
        old = log_probs_of(llama, request.prompt_ids, response)[:split]
        np.testing.assert_allclose(result.tokens.log_probs[:split], old, atol=1e-4)
        fresh = log_probs_of(new, request.prompt_ids, response)[split:]
        np.testing.assert_allclose(result.tokens.log_probs[split:], fresh, atol=1e-4)


def test_a_cache_that_cannot_be_reset_is_an_error_and_nothing_is_sampled_until_it_can(
    engine: VLLMEngine, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(engine._engine, "reset_prefix_cache", lambda **_: False)
        with pytest.raises(EngineError, match="prefix cache could not be reset after the update to version 9"):
            update(engine, make_model("llama", seed=5), 9)
    assert engine.version == 0
    with pytest.raises(EngineError, match="finish_update"):
        engine.step()
    update(engine, make_model("llama", seed=5), 9)
    assert run(engine, ask("a"))["a"].tokens.versions.tolist() == [9] * 20


def test_weights_arrive_through_a_broadcast(
    engine: VLLMEngine, make_model: MakeModel, log_probs_of: LogProbsOf
) -> None:
    new = make_model("llama", seed=6)
    publisher = Publisher(1 << 16, "127.0.0.1")
    link = WeightLink(publisher.address, 1, ("the learner", "engine 0"))
    with ThreadPoolExecutor(1) as sender:
        connected = sender.submit(publisher.connect, link, 30)
        engine.join_weights(link, 1, 30)
        connected.result(30)
        for version in (4, 5):
            named = dict(new.named_parameters())
            sent = sender.submit(publisher.publish, describe(named.items()), named.items(), version, 30)
            report = engine.receive_weights(version, 30)
            assert sent.result(30).nbytes == report.nbytes
            assert engine.manifest == manifest_of(named.items())
            assert report.version == sent.result().version == engine.manifest.version(version)
            # The largest tensor is 97 x 64: no bucket is larger than 64 KiB.
            assert report.peak_buffer_bytes <= 2 << 16
    pair = (PROMPTS[0], (8, 9, 10))
    np.testing.assert_allclose(engine.score([pair], 1.0)[0], log_probs_of(new, *pair), atol=1e-4)
    assert engine.version == 5


def test_an_interrupted_request_goes_on_and_keeps_what_it_had(
    engine: VLLMEngine, llama: PreTrainedModel, log_probs_of: LogProbsOf
) -> None:
    request = ask("a", seed=5, length=30)
    engine.add(request)
    engine.add(ask("b", seed=6, length=30))
    for _ in range(8):
        engine.step()
    (partial,) = engine.abort([named("a")])
    assert partial.finish == "aborted"
    assert 0 < len(partial.tokens.ids) < 30
    result = run(engine, continued(request, partial))["a"]
    assert result.tokens.ids.tolist()[: len(partial.tokens.ids)] == partial.tokens.ids.tolist()
    expected = log_probs_of(llama, request.prompt_ids, tuple(result.tokens.ids.tolist()))
    np.testing.assert_allclose(result.tokens.log_probs, expected, atol=1e-4)
    assert len(result.tokens.ids) == len(result.tokens.versions) == 30


def test_sleep_sets_requests_aside_and_wake_goes_on(engine: VLLMEngine) -> None:
    engine.add(ask("a", seed=1, length=30))
    for _ in range(5):
        engine.step()
    engine.sleep()
    engine.add(ask("b", seed=2))
    assert (engine.running, engine.waiting, engine.has_work) == (0, 2, False)
    with pytest.raises(EngineError, match="wake"):
        engine.step()
    engine.wake()
    assert {name: len(result.tokens.ids) for name, result in run(engine).items()} == {"a": 30, "b": 20}


def test_the_fingerprint_is_that_of_the_weights_in_memory(engine: VLLMEngine, make_model: MakeModel) -> None:
    """Whatever lies in between: the same after the same update, another after another, none while they are away."""
    first = engine.resident()
    assert first is not None
    assert len(first.sums) > 5
    update(engine, make_model("llama", seed=7), 3)
    other = engine.resident()
    assert other is not None
    assert other.layout == first.layout
    assert any("embed_tokens" in name for name in differing(first.sums, other.sums))
    update(engine, make_model("llama", seed=7), 4)
    assert engine.resident() == other
    engine.sleep()
    assert engine.resident() is None
    engine.wake()
    assert engine.resident() == other


@core_here
def test_weights_wake_for_an_update_before_the_cache_does(
    engine: VLLMEngine, make_model: MakeModel, log_probs_of: LogProbsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM itself holds to be asleep; that its CPU worker frees nothing is no matter here."""
    monkeypatch.setattr(engine, "_can_sleep", True)
    inner: Any = engine._engine
    asleep = inner.engine_core.engine_core.model_executor.sleeping_tags
    levels: list[int] = []
    sleep = inner.sleep
    monkeypatch.setattr(inner, "sleep", lambda level: (levels.append(level), sleep(level)))
    engine.add(ask("a", seed=1))
    engine.step()
    engine.sleep(keep_weights=False)
    # By level 1 they would be copied to the host and back, though others come.
    assert levels == [2]
    assert asleep == {"weights", "kv_cache"}
    assert engine.manifest is None
    with pytest.raises(EngineError, match="before the update"):
        engine.wake()
    engine.wake_weights()
    engine.wake_weights()
    assert asleep == {"kv_cache"}
    for call in (engine.step, lambda: engine.score([((1, 2), (3,))], 1.0)):
        with pytest.raises(EngineError, match="wake"):
            call()
    other = make_model("llama", seed=9)
    update(engine, other, 4)
    assert asleep == {"kv_cache"}
    engine.wake()
    engine.wake()
    assert asleep == set()
    result = run(engine, ask("b", seed=3))["b"]
    assert set(result.tokens.versions.tolist()) == {4}
    expected = log_probs_of(other, PROMPTS[0], tuple(result.tokens.ids.tolist()))
    np.testing.assert_allclose(result.tokens.log_probs, expected, atol=1e-4)


def test_an_update_that_brings_a_part_of_the_model_is_refused(
    engine: VLLMEngine, llama: PreTrainedModel, make_model: MakeModel
) -> None:
    if not engine.takes_tensors:
        pytest.skip("the worker is the same")
    new = dict(make_model("llama", seed=6).named_parameters())
    engine.begin_update()
    engine.load((name, tensor) for name, tensor in new.items() if name != "model.norm.weight")
    with pytest.raises(EngineError, match=r"lacks 1 parameters, first model\.norm\.weight"):
        engine.finish_update(9, Manifest([]))
    with pytest.raises(EngineError, match="finish_update"):
        engine.step()
    update(engine, llama, 10)


def test_what_cannot_fit_or_is_complete_already(engine: VLLMEngine) -> None:
    with pytest.raises(ValueError, match=r"of long: 9 prompt tokens and up to 195 response tokens.*context of 200"):
        engine.add(ask("long", (1,) * 9, length=195))
    one_token = Tokens.sampled(np.array([4], np.int32), np.array([-1.0], np.float32), np.array([7], np.int32))
    full = dataclasses.replace(ask("full", length=1), begun=one_token)
    assert run(engine, full)["full"].tokens.versions.tolist() == [7]
    with pytest.raises(EngineError, match="before begin_update"):
        engine.load([])


@core_here
def test_a_second_one_in_the_process_is_refused(engine: VLLMEngine, llama_folder: Path) -> None:
    with pytest.raises(EngineError, match=r"another one is open in this process; close\(\)"):
        type(engine)(llama_folder)
    assert len(run(engine, ask("still works"))["still works"].tokens.ids) == 20


def test_vllm_s_defaults_are_those_that_the_engine_was_written_for(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails here after an upgrade has moved: see what the engine makes of it, then write the new value."""
    from vllm import EngineArgs
    from vllm.config import SchedulerConfig
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    defaults = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
    expected = {
        "async_scheduling": None,  # decided by vLLM: on for CUDA, so that a batch is under way when weights come
        "enable_chunked_prefill": None,  # on, but for what we turn off on CPUs
        "gpu_memory_utilization": 0.92,
        "logprobs_mode": "raw_logprobs",  # ours are "processed_logprobs"
        "max_num_batched_tokens": None,
        "scheduling_policy": "fcfs",  # requests enter in the order in which they were submitted
        "kv_cache_dtype": "auto",
        "enable_sleep_mode": False,
    }
    assert {name: defaults[name] for name in expected} == expected
    # An engine in our process has no number of its own for what a step reads.
    assert SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS == 2048
    monkeypatch.setattr(arg_utils.current_platform, "is_cpu", lambda: False)
    for gigabytes, card, bare in ((80, "NVIDIA H100 80GB HBM3", 16384), (40, "NVIDIA A100-SXM4-40GB", 8192)):
        monkeypatch.setattr(arg_utils.current_platform, "get_device_total_memory", lambda size=gigabytes: size << 30)
        monkeypatch.setattr(arg_utils.current_platform, "get_device_name", lambda name=card: name)
        tokens, _ = EngineArgs.get_batch_defaults(1)
        assert tokens.get(UsageContext.ENGINE_CONTEXT) is None
        assert tokens[UsageContext.LLM_CLASS] == bare
    config = engine._engine.vllm_config
    # Both are on unless told: prompts are cached, and the cache is reset with each update.
    assert config.cache_config.enable_prefix_caching
    assert config.model_config.logprobs_mode == "processed_logprobs"
    assert config.scheduler_config.max_num_batched_tokens == 200
