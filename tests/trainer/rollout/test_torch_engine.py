"""The torch engine against transformers: same tokens, same log-probs, whatever runs beside a request."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from small_episodes import named
from transformers import PreTrainedModel

from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings, continued
from rljob_trainer.episodes.tokens import Tokens
from rljob_trainer.errors import EngineError, JobFileError
from rljob_trainer.rollout import scoring
from rljob_trainer.rollout.torch_engine import TorchEngine
from rljob_trainer.weights.manifest import Manifest, manifest_of

VOCABULARY = 97
FAMILIES = ["llama", "llama3", "qwen2", "qwen3", "gemma2", "gemma3_text"]
MakeModel = Callable[..., PreTrainedModel]
LogProbsOf = Callable[..., np.ndarray]


def ask(
    name: str,
    prompt: tuple[int, ...] = (5, 6, 7),
    *,
    seed: int = 0,
    temperature: float = 1.0,
    max_tokens: int = 12,
    stop: tuple[int, ...] = (),
    top_k: int = 0,
    top_p: float = 1.0,
) -> GenerationRequest:
    return GenerationRequest(named(name), prompt, SamplingSettings(temperature, top_p, top_k, max_tokens, stop), seed)


def run(engine: TorchEngine, *requests: GenerationRequest) -> dict[str, GenerationResult]:
    for request in requests:
        engine.add(request)
    results: dict[str, GenerationResult] = {}
    while engine.has_work:
        results.update((result.id.purpose, result) for result in engine.step())
    return results


def random_prompts(count: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(0, VOCABULARY, rng.integers(1, 14)).tolist()) for _ in range(count)]


# ---------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_token_for_token(family: str, make_model: MakeModel) -> None:
    model = make_model(family)
    prompts = random_prompts(7)
    # Three rows for seven requests of different lengths: rows are taken over and moved while others run.
    engine = TorchEngine.from_model(model, max_concurrent=3)
    results = run(engine, *(ask(str(i), p, temperature=0, max_tokens=6 + 5 * i) for i, p in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        generate: Any = model.generate
        expected = generate(torch.tensor([prompt]), max_new_tokens=6 + 5 * i, do_sample=False)
        assert results[str(i)].tokens.ids.tolist() == expected[0, len(prompt) :].tolist()
        assert results[str(i)].finish == "length"


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_a_float32_forward_pass(family: str, make_model: MakeModel, log_probs_of: LogProbsOf) -> None:
    model = make_model(family)
    prompts = random_prompts(9)
    engine = TorchEngine.from_model(model, max_concurrent=4)
    temperatures = [(1.0, 0.7, 1.6)[i % 3] for i in range(9)]
    results = run(engine, *(ask(str(i), p, temperature=temperatures[i], seed=i) for i, p in enumerate(prompts)))
    pairs = [(prompt, tuple(results[str(i)].tokens.ids.tolist())) for i, prompt in enumerate(prompts)]
    for i, (prompt, response) in enumerate(pairs):
        expected = log_probs_of(model, prompt, response, temperatures[i])
        np.testing.assert_allclose(results[str(i)].tokens.log_probs, expected, atol=1e-5)
    for (prompt, response), scored in zip(pairs, engine.score(pairs, 0.7), strict=True):
        np.testing.assert_allclose(scored, log_probs_of(model, prompt, response, 0.7), atol=1e-5)


def test_greedy_requests_report_log_probs_at_temperature_one(llama: PreTrainedModel, log_probs_of: LogProbsOf) -> None:
    result = run(TorchEngine.from_model(llama), ask("a", temperature=0), ask("b", temperature=0.5))["a"]
    expected = log_probs_of(llama, (5, 6, 7), tuple(result.tokens.ids.tolist()))
    np.testing.assert_allclose(result.tokens.log_probs, expected, atol=1e-5)


def test_tokens_are_drawn_from_the_softmax(llama: PreTrainedModel) -> None:
    """Chi-square of 20,000 first tokens with fixed seeds against the model's distribution at temperature 0.8."""
    engine = TorchEngine.from_model(llama, max_concurrent=500)
    results = run(engine, *(ask(str(i), seed=i, max_tokens=1, temperature=0.8) for i in range(20_000)))
    counts = np.bincount([int(result.tokens.ids[0]) for result in results.values()], minlength=VOCABULARY)
    with torch.no_grad():
        logits = llama(torch.tensor([[5, 6, 7]])).logits[0, -1].double()
    expected = (logits / 0.8).softmax(-1).numpy() * 20_000
    assert expected.min() >= 5
    assert stats.chisquare(counts, expected).pvalue > 0.01


# ---------------------------------------------------------------------- seeds and neighbours


def test_the_same_seed_draws_the_same_tokens_whatever_runs_beside(llama: PreTrainedModel) -> None:
    alone = run(TorchEngine.from_model(llama), ask("a", seed=41, max_tokens=30))["a"]
    others = [ask(f"x{i}", p, seed=i, max_tokens=3 + i) for i, p in enumerate(random_prompts(9))]
    crowded = run(
        TorchEngine.from_model(llama, max_concurrent=4), *others[:6], ask("a", seed=41, max_tokens=30), *others
    )
    assert crowded["a"].tokens.ids.tolist() == alone.tokens.ids.tolist()
    np.testing.assert_allclose(crowded["a"].tokens.log_probs, alone.tokens.log_probs, atol=1e-5)


def test_the_same_requests_in_the_same_order_are_bitwise_the_same(llama: PreTrainedModel) -> None:
    def once() -> dict[str, GenerationResult]:
        requests = [ask(str(i), p, seed=i, max_tokens=5 + i) for i, p in enumerate(random_prompts(9))]
        return run(TorchEngine.from_model(llama, max_concurrent=4), *requests)

    first, second = once(), once()
    for name, result in first.items():
        assert np.array_equal(result.tokens.ids, second[name].tokens.ids)
        assert np.array_equal(result.tokens.log_probs, second[name].tokens.log_probs)


def test_siblings_of_a_prompt_are_prefilled_once_and_differ_by_seed(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine.from_model(llama)
    shapes: list[tuple[int, ...]] = []
    prefill = engine._decoder.prefill

    def watched(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.append(tuple(ids.shape))
        return prefill(ids, *rest)

    monkeypatch.setattr(engine._decoder, "prefill", watched)
    siblings = [
        ask(f"{p}-{i}", prompt, seed=10 * p + i) for p, prompt in enumerate([(1, 2, 3, 4), (9, 8)]) for i in range(8)
    ]
    results = run(engine, *siblings)
    assert shapes == [(2, 4)]
    for request in siblings:
        alone = run(TorchEngine.from_model(llama), request)[request.id.purpose]
        assert results[request.id.purpose].tokens.ids.tolist() == alone.tokens.ids.tolist()
    assert len({tuple(result.tokens.ids.tolist()) for result in results.values()}) == 16


# ---------------------------------------------------------------------- how requests end


def test_a_response_ends_with_its_first_stop_token(llama: PreTrainedModel) -> None:
    free = run(TorchEngine.from_model(llama), *(ask(str(i), seed=i, max_tokens=40) for i in range(20)))
    engine = TorchEngine.from_model(llama, max_concurrent=6)
    stops = {str(i): (3, 11, 50, 51, 52, 53, 90) if i % 2 else (7, 10**6) for i in range(20)}
    stopped = run(engine, *(ask(str(i), seed=i, max_tokens=40, stop=stops[str(i)]) for i in range(20)))
    reasons = set()
    for name, result in stopped.items():
        tokens = free[name].tokens.ids.tolist()
        hits = [position for position, token in enumerate(tokens) if token in stops[name]]
        expected = tokens[: hits[0] + 1] if hits else tokens
        assert result.tokens.ids.tolist() == expected
        assert result.finish == ("stop" if hits else "length")
        reasons.add(result.finish)
    assert reasons == {"stop", "length"}


def test_one_token_is_a_whole_response(llama: PreTrainedModel) -> None:
    result = run(TorchEngine.from_model(llama), ask("a", max_tokens=1))["a"]
    assert (len(result.tokens.ids), result.finish) == (1, "length")


def test_what_cannot_fit_is_refused_at_once(llama: PreTrainedModel) -> None:
    engine = TorchEngine.from_model(llama, max_context=20)
    with pytest.raises(ValueError, match=r"of long: 9 prompt tokens and up to 12 response tokens.*context of 20"):
        engine.add(ask("long", (1,) * 9))
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.add(ask("empty", ()))
    with pytest.raises(ValueError, match="bytes of KV cache"):
        TorchEngine.from_model(llama, kv_cache_bytes=1024).add(ask("big"))
    assert not engine.has_work


def test_a_small_cache_makes_requests_wait_and_all_finish(llama: PreTrainedModel) -> None:
    # 2 layers x 2 kv heads x 32 x 2 (keys and values) x 4 bytes = 1 KiB a token: two rows of 60 tokens.
    engine = TorchEngine.from_model(llama, kv_cache_bytes=120 * 1024)
    wide = TorchEngine.from_model(llama)
    requests = [ask(str(i), p, seed=i, max_tokens=20 + 2 * i) for i, p in enumerate(random_prompts(12))]
    results, expected = run(engine, *requests), run(wide, *requests)
    assert {name: r.tokens.ids.tolist() for name, r in results.items()} == {
        name: r.tokens.ids.tolist() for name, r in expected.items()
    }


def test_short_requests_go_past_a_long_one_that_does_not_fit_but_not_for_ever(llama: PreTrainedModel) -> None:
    # 1 KiB a token: twelve rows of 15 tokens, or one of 160.
    engine = TorchEngine.from_model(llama, kv_cache_bytes=192 * 1024)
    first = [ask(f"first {i}", seed=i, max_tokens=5 + i) for i in range(3)]
    long = ask("long", tuple(range(90)), max_tokens=70)
    short = [ask(f"short {i}", seed=i) for i in range(200)]
    for request in first:
        engine.add(request)
    engine.step()
    for request in [long, *short]:
        engine.add(request)
    engine.step()
    assert (engine.running, engine.waiting) == (12, 192)
    order: list[str] = []
    while engine.has_work:
        order += [result.id.purpose for result in engine.step()]
    assert len(order) == 204
    # Three that ran before, and those that may go past.
    assert 3 < order.index("long") < 3 + 70


def test_those_who_run_wait_for_one_pass_over_new_prompts_at_a_time(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "PASS_TOKENS", 250)
    engine = TorchEngine.from_model(llama)
    engine.add(ask("running", max_tokens=50))
    engine.step()
    for number in range(3):
        for sibling in range(2):
            engine.add(ask(f"{number}/{sibling}", (number,) * 200, seed=sibling, max_tokens=30))
    running = []
    while engine.waiting:
        tokens = engine.tokens_made
        engine.step()
        running.append(engine.running)
        # Everybody who ran gets one token, the new ones two.
        assert engine.tokens_made == tokens + running[-1] + 2
    assert running == [3, 5, 7]
    results: dict[str, GenerationResult] = {}
    while engine.has_work:
        results.update((result.id.purpose, result) for result in engine.step())
    alone = run(TorchEngine.from_model(llama), ask("2/1", (2,) * 200, seed=1, max_tokens=30))["2/1"]
    assert results["2/1"].tokens.ids.tolist() == alone.tokens.ids.tolist()


def test_longer_requests_later_enlarge_cache_and_output(llama: PreTrainedModel) -> None:
    engine = TorchEngine.from_model(llama)
    engine.add(ask("short", seed=1, max_tokens=30))
    engine.step()
    results = run(engine, ask("long", (4,) * 50, seed=2, max_tokens=120))
    for name, request in {
        "short": ask("short", seed=1, max_tokens=30),
        "long": ask("long", (4,) * 50, seed=2, max_tokens=120),
    }.items():
        expected = run(TorchEngine.from_model(llama), request)[name]
        assert results[name].tokens.ids.tolist() == expected.tokens.ids.tolist()


# ---------------------------------------------------------------------- interruption and versions


def test_an_interrupted_request_goes_on_as_if_it_had_not_been(llama: PreTrainedModel) -> None:
    request = ask("a", seed=5, max_tokens=25)
    whole = run(TorchEngine.from_model(llama), request)["a"]
    engine = TorchEngine.from_model(llama, version=3)
    engine.add(request)
    engine.add(ask("b", seed=6, max_tokens=25))
    for _ in range(8):
        engine.step()
    (partial,) = engine.abort([named("a")])
    assert partial.finish == "aborted"
    assert 0 < len(partial.tokens.ids) < 25
    assert engine.running == 1
    other = TorchEngine.from_model(llama, version=4)
    result = run(other, continued(request, partial), ask("c", (1, 2)))["a"]
    assert result.tokens.ids.tolist() == whole.tokens.ids.tolist()
    np.testing.assert_allclose(result.tokens.log_probs, whole.tokens.log_probs, atol=1e-5)
    assert result.tokens.versions.tolist() == [3] * len(partial.tokens.ids) + [4] * (25 - len(partial.tokens.ids))


def begun(tokens: tuple[int, ...], log_probs: tuple[float, ...], versions: tuple[int, ...]) -> Tokens:
    return Tokens.sampled(np.array(tokens, np.int32), np.array(log_probs, np.float32), np.array(versions, np.int32))


def test_a_partial_that_is_already_complete_comes_back_as_it_is(llama: PreTrainedModel) -> None:
    engine = TorchEngine.from_model(llama)
    full = dataclasses.replace(ask("a", max_tokens=2), begun=begun((1, 2), (-1.0, -2.0), (7, 8)))
    ended = dataclasses.replace(ask("b", stop=(9,)), begun=begun((9,), (-0.5,), (7,)))
    results = run(engine, full, ended)
    assert (results["a"].finish, results["a"].tokens.versions.tolist()) == ("length", [7, 8])
    assert (results["b"].finish, results["b"].tokens.ids.tolist()) == ("stop", [9])


def test_abort_returns_waiting_and_running_requests(llama: PreTrainedModel) -> None:
    engine = TorchEngine.from_model(llama, max_concurrent=2)
    for i in range(5):
        engine.add(ask(str(i), seed=i))
    engine.step()
    partials = {result.id.purpose: len(result.tokens.ids) for result in engine.abort()}
    assert partials == {"0": 2, "1": 2, "2": 0, "3": 0, "4": 0}
    assert not engine.has_work


def test_tokens_carry_the_version_that_made_them(llama_folder: Path) -> None:
    engine = TorchEngine.from_folder(llama_folder)
    engine.add(ask("a", max_tokens=10))
    for _ in range(3):
        engine.step()  # the first step draws two tokens: prefill and one decoding step
    engine.begin_update()
    with pytest.raises(EngineError, match="finish_update"):
        engine.step()
    engine.load((name, tensor * 1.01) for name, tensor in list(engine.parameters.items()))
    engine.finish_update(5, Manifest([]))
    assert engine.version == 5
    assert run(engine)["a"].tokens.versions.tolist() == [0] * 4 + [5] * 6


def test_sleep_keeps_the_tokens_and_wake_goes_on(llama: PreTrainedModel) -> None:
    expected = run(TorchEngine.from_model(llama), ask("a", seed=1), ask("b", (3,), seed=2))
    engine = TorchEngine.from_model(llama)
    engine.add(ask("a", seed=1))
    engine.add(ask("b", (3,), seed=2))
    engine.step()
    engine.sleep()
    assert (engine.running, engine.waiting) == (0, 2)
    with pytest.raises(EngineError, match="wake"):
        engine.step()
    engine.wake()
    results = run(engine)
    assert {n: r.tokens.ids.tolist() for n, r in results.items()} == {
        n: r.tokens.ids.tolist() for n, r in expected.items()
    }


def test_an_engine_holds_a_manifest_from_an_update_on_until_its_weights_are_given_up(llama_folder: Path) -> None:
    engine = TorchEngine.from_folder(llama_folder)
    assert engine.manifest is None
    named = dict(engine.parameters)
    manifest = manifest_of(named.items())
    engine.begin_update()
    engine.load(named.items())
    engine.finish_update(1, manifest)
    engine.sleep()
    engine.wake()
    assert engine.manifest == manifest
    engine.sleep(keep_weights=False)
    assert engine.manifest is None
    with pytest.raises(EngineError, match="before the update"):
        engine.wake()
    engine.begin_update()
    with pytest.raises(EngineError, match=rf"version 2 lacks {len(named)} parameters"):
        engine.finish_update(2, manifest)
    engine.load(named.items())
    engine.finish_update(2, manifest)
    engine.wake()
    assert (engine.version, engine.manifest) == (2, manifest)
    engine.begin_update()
    assert engine.manifest is None


def bytes_of_tensors() -> int:
    """Memory behind all tensors of this process."""
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) is torch.Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("shared", [True, False])
def test_a_sleeping_engine_holds_no_cache_and_the_same_weights(
    shared: bool, llama: PreTrainedModel, llama_folder: Path
) -> None:
    engine = TorchEngine.from_model(llama) if shared else TorchEngine.from_folder(llama_folder)
    asked = [ask(str(i), seed=i) for i in range(4)]
    expected = run(engine, *asked)
    weights = {name: tensor.clone() for name, tensor in engine.parameters.items()}
    config = llama.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Keys and values in float32 of at least 15 tokens for each that may run.
    least = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 15 * 4 * 256
    awake = bytes_of_tensors()
    engine.sleep()
    asleep = bytes_of_tensors()
    assert awake - asleep >= least
    with pytest.raises(EngineError, match="wake"):
        engine.score([((1, 2), (3,))], 1.0)
    engine.wake_weights()
    with pytest.raises(EngineError, match="wake"):
        engine.step()
    engine.wake()
    again = run(engine, *asked)
    assert bytes_of_tensors() - asleep >= least
    for name, result in expected.items():
        assert again[name].tokens.ids.tolist() == result.tokens.ids.tolist()
        np.testing.assert_array_equal(again[name].tokens.log_probs, result.tokens.log_probs)
    assert all(torch.equal(engine.parameters[name], tensor) for name, tensor in weights.items())


# ---------------------------------------------------------------------- weights


def test_a_shared_model_s_optimizer_step_is_seen_at_once(make_model: MakeModel, log_probs_of: LogProbsOf) -> None:
    model = make_model("qwen2", seed=3)
    engine = TorchEngine.from_model(model)
    pair = ((1, 2, 3), (4, 5, 6, 7))
    before = engine.score([pair], 1.0)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([[1, 2, 3, 4]])).logits.logsumexp(-1).sum().backward()
    engine.begin_update()
    optimizer.step()
    engine.finish_update(1, Manifest([]))
    after = engine.score([pair], 1.0)[0]
    assert np.abs(after - before).max() > 1e-2
    np.testing.assert_allclose(after, log_probs_of(model, *pair), atol=1e-5)
    engine.begin_update()
    with pytest.raises(EngineError, match="shares the learner's weights"):
        engine.load([])


def test_loaded_weights_are_the_new_model(llama_folder: Path, make_model: MakeModel, log_probs_of: LogProbsOf) -> None:
    new = make_model("llama", seed=9)
    engine = TorchEngine.from_folder(llama_folder)
    engine.begin_update()
    named = list(new.named_parameters())
    engine.load(named[:5])
    engine.load(named[5:])
    engine.finish_update(1, Manifest([]))
    pair = ((1, 2, 3), (4, 5, 6, 7))
    np.testing.assert_allclose(engine.score([pair], 1.0)[0], log_probs_of(new, *pair), atol=1e-5)


def test_an_update_that_does_not_fit_names_the_parameter(llama_folder: Path, llama: PreTrainedModel) -> None:
    engine = TorchEngine.from_folder(llama_folder)
    with pytest.raises(EngineError, match="before begin_update"):
        engine.load([])
    engine.begin_update()
    with pytest.raises(EngineError, match=r"received model\.norm\.weight of shape \(3,\).*shape \(64,\)"):
        engine.load([("model.norm.weight", torch.ones(3))])
    with pytest.raises(EngineError, match=r"received model\.norm\.weight .*bfloat16, but its model has .*float32"):
        engine.load([("model.norm.weight", torch.ones(64, dtype=torch.bfloat16))])
    with pytest.raises(EngineError, match=r"received unknown\.weight .*no such parameter"):
        engine.load([("unknown.weight", torch.ones(3))])
    engine.load(list(llama.named_parameters())[1:])
    with pytest.raises(EngineError, match=r"lacks 1 parameters, first model\.embed_tokens\.weight"):
        engine.finish_update(1, Manifest([]))


def test_an_architecture_it_does_not_know_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(JobFileError, match=r"llama, mistral, .*qwen3_moe, but this model is a 'gpt2'; use .*vllm"):
        TorchEngine.from_folder(tmp_path)
    with pytest.raises(JobFileError, match=r"no config\.json"):
        TorchEngine.from_folder(tmp_path / "nowhere")


# ---------------------------------------------------------------------- evaluation settings


def test_top_k_and_top_p_draw_from_the_kept_tokens_only(llama: PreTrainedModel) -> None:
    with torch.no_grad():
        probabilities = llama(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1)
    ordered, order = probabilities.sort(descending=True)
    nucleus = int((ordered.cumsum(0) < 0.5).sum()) + 1
    kept = {"k": order[:4].tolist(), "p": order[:nucleus].tolist(), "both": order[: min(2, nucleus)].tolist()}
    settings: dict[str, dict[str, float]] = {"k": {"top_k": 4}, "p": {"top_p": 0.5}, "both": {"top_k": 2, "top_p": 0.5}}
    engine = TorchEngine.from_model(llama)
    for name, extra in settings.items():
        requests = [ask(str(i), seed=i, max_tokens=1, **extra) for i in range(300)]  # type: ignore[arg-type]
        for result in run(engine, *requests, ask("free", max_tokens=1)).values():
            if result.id.purpose == "free":
                continue
            token = int(result.tokens.ids[0])
            assert token in kept[name]
            total = float(probabilities[kept[name]].sum()) if name != "both" else None
            if total:
                assert result.tokens.log_probs[0] == pytest.approx(
                    math.log(float(probabilities[token]) / total), abs=1e-5
                )
