"""vLLM with ``keep_cache``: who runs across an update keeps its keys and values, who starts later never meets them.

A file of its own: no second vLLM may be open beside the one that ``test_vllm_engine.py`` keeps. The expected numbers
are those of transformers with its own cache: filled by the old model, continued by the new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from small_episodes import named
from transformers import DynamicCache, PreTrainedModel

from rljob_trainer.episodes.requests import GenerationRequest, GenerationResult, SamplingSettings
from rljob_trainer.weights.manifest import Manifest

if TYPE_CHECKING:
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

pytestmark = pytest.mark.vllm

# vLLM caches whole blocks of tokens (128 of them on a CPU, 16 on a GPU): the prompt has to fill one.
PROMPT = tuple(3 + i % 90 for i in range(150))
LENGTH, RUNNING = 30, 4


@pytest.fixture(scope="module")
def engine(llama_folder: Path) -> Iterator[VLLMEngine]:
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

    engine = VLLMEngine(
        llama_folder,
        max_concurrent=RUNNING,
        max_context=200,
        keep_cache=True,
        engine_args={"kv_cache_memory_bytes": 32 << 20},
    )
    yield engine
    engine.close()


def sibling(number: int, length: int = LENGTH) -> GenerationRequest:
    return GenerationRequest(named(str(number)), PROMPT, SamplingSettings(max_tokens=length), seed=number)


def update(engine: VLLMEngine, model: PreTrainedModel, version: int) -> None:
    engine.begin_update()
    engine.load(model.named_parameters())
    engine.finish_update(version, Manifest([]))


def finish(engine: VLLMEngine, results: dict[str, GenerationResult]) -> None:
    while engine.has_work:
        results.update((result.id.purpose, result) for result in engine.step())


def mixed_log_probs(old: PreTrainedModel, new: PreTrainedModel, response: list[int], split: int) -> np.ndarray:
    """Log-probs ``[T - split]`` of the tokens from ``split`` on: ``old`` has read what was there before the token
    ``split - 1``, the last that it drew; ``new`` reads that one and what follows."""
    read = len(PROMPT) + split - 1
    ids = torch.tensor([[*PROMPT, *response]])
    cache = DynamicCache()
    with torch.no_grad():
        old(ids[:, :read], past_key_values=cache)
        logits = new(ids[:, read:-1], past_key_values=cache).logits[0]
    return logits.log_softmax(-1).gather(1, ids[0, read + 1 :, None])[:, 0].numpy()


def test_running_siblings_keep_their_cache_and_later_ones_do_not_meet_it(
    engine: VLLMEngine,
    llama: PreTrainedModel,
    make_model: Callable[..., PreTrainedModel],
    log_probs_of: Callable[..., np.ndarray],
) -> None:
    new = make_model("llama", seed=5)
    results: dict[str, GenerationResult] = {}
    # Of one group: one that is finished by the time of the update, three that run, two that have no room yet.
    engine.add(sibling(0, length=4))
    for number in range(1, 6):
        engine.add(sibling(number))
    for _ in range(10):
        results.update((result.id.purpose, result) for result in engine.step())
    assert set(results) == {"0"}
    update(engine, new, 7)
    # One more of the group, and the guard's question, while the others run.
    engine.add(sibling(6))
    pairs = [(PROMPT[:1], PROMPT[1:]), ((9,), (8, 7))] * 3
    for pair, scores in zip(pairs, engine.score(pairs, 1.0), strict=True):
        np.testing.assert_allclose(scores, log_probs_of(new, *pair), atol=1e-4)
    finish(engine, results)
    assert {name: len(result.tokens.ids) for name, result in results.items()} == {"0": 4} | dict.fromkeys("123456", 30)
    for number in range(7):
        result = results[str(number)]
        response = result.tokens.ids.tolist()
        split = int(np.searchsorted(result.tokens.versions, 7))
        assert result.tokens.versions.tolist() == [0] * split + [7] * (len(response) - split)
        alone = log_probs_of(llama if split else new, PROMPT, tuple(response))
        if number == 0:
            np.testing.assert_allclose(result.tokens.log_probs, alone, atol=1e-4)
        elif number <= 4:
            assert 4 < split < 20
            np.testing.assert_allclose(result.tokens.log_probs[:split], alone[:split], atol=1e-4)
            expected = mixed_log_probs(llama, new, response, split)
            np.testing.assert_allclose(result.tokens.log_probs[split:], expected, atol=1e-4)
            # Prefilled anew they would be these.
            anew = log_probs_of(new, PROMPT, tuple(response))[split:]
            assert np.abs(result.tokens.log_probs[split:] - anew).max() > 1e-2
        else:
            assert split == 0
            np.testing.assert_allclose(result.tokens.log_probs, alone, atol=1e-4)


def test_what_is_sent_again_under_the_same_version_never_meets_the_cache_of_the_first_sending(
    engine: VLLMEngine, make_model: Callable[..., PreTrainedModel], log_probs_of: Callable[..., np.ndarray]
) -> None:
    """As when an engine deviates: it has wrong weights under the right number, and requests run meanwhile."""
    wrong, right = make_model("llama", seed=8), make_model("llama", seed=9)
    update(engine, wrong, 8)
    engine.add(sibling(10))
    for _ in range(5):
        assert engine.step() == []
    update(engine, right, 8)
    engine.add(sibling(11))
    (scores,) = engine.score([(PROMPT[:1], PROMPT[1:])], 1.0)
    np.testing.assert_allclose(scores, log_probs_of(right, PROMPT[:1], PROMPT[1:]), atol=1e-4)
    results: dict[str, GenerationResult] = {}
    finish(engine, results)
    later = results["11"]
    expected = log_probs_of(right, PROMPT, tuple(later.tokens.ids.tolist()))
    np.testing.assert_allclose(later.tokens.log_probs, expected, atol=1e-4)


def test_siblings_that_are_together_read_their_prompt_once(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    cached: dict[str, int] = {}
    step = engine._engine.step

    def watched() -> Any:
        outputs = step()
        cached.update((output.request_id, output.num_cached_tokens) for output in outputs)
        return outputs

    monkeypatch.setattr(engine._engine, "step", watched)
    assert engine._engine.reset_prefix_cache()
    # Together, and one that has to wait for room.
    for number in range(20, 21 + RUNNING):
        engine.add(sibling(number, length=5))
    finish(engine, {})
    block = engine._engine.vllm_config.cache_config.block_size
    shared = len(PROMPT) // block * block
    assert shared > 0
    expected = {str(named("20")): 0} | {str(named(str(number))): shared for number in range(21, 21 + RUNNING)}
    assert cached == expected


def test_a_batch_that_is_under_way_when_weights_come_belongs_to_the_weights_that_made_it(
    engine: VLLMEngine, make_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs vLLM schedules a batch before it takes in the last one's tokens: one is under way between steps."""
    old, new = make_model("llama", seed=20), make_model("llama", seed=21)
    update(engine, old, 20)
    core = engine._engine.engine_core.engine_core  # type: ignore[attr-defined]
    monkeypatch.setattr(core, "batch_queue_size", 2)
    monkeypatch.setattr(core, "batch_queue", deque(maxlen=2))
    monkeypatch.setattr(core, "step_fn", core.step_with_batch_queue)
    for number in range(30, 33):
        engine.add(sibling(number))
    for _ in range(40):
        engine.step()
        under_way = [scheduled.total_num_scheduled_tokens for _, scheduled, _ in core.batch_queue]
        if engine.tokens_made and max(under_way, default=0) == 3 and engine._tokens_inside(str(named("30"))) > 4:
            break
    else:
        pytest.fail("no batch was ever under way between two steps")
    so_far = engine._tokens_inside(str(named("30")))
    update(engine, new, 21)
    results: dict[str, GenerationResult] = {}
    finish(engine, results)
    for result in results.values():
        response = result.tokens.ids.tolist()
        split = int(np.searchsorted(result.tokens.versions, 21))
        assert split == so_far + 1
        assert result.tokens.versions.tolist() == [20] * split + [21] * (LENGTH - split)
        expected = mixed_log_probs(old, new, response, split)
        np.testing.assert_allclose(result.tokens.log_probs[split:], expected, atol=1e-4)
    assert len(results) == 3
