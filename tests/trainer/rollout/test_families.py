"""Engines and learner are one model, of families with ways of their own (Gemma, mixtures of experts): before an update,
and after its weights were published with their manifest."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from cut_for import cut_for
from small_episodes import named
from tiny_gemma import WINDOW, gemma
from tiny_mixture import mixture
from transformers import AutoModelForCausalLM, PreTrainedModel

from rljob_trainer.episodes.requests import GenerationRequest, SamplingSettings
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.rollout.protocol import Engine
from rljob_trainer.rollout.torch_engine import TorchEngine
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.manifest import manifest_of
from rljob_trainer.weights.plan import describe
from rljob_trainer.weights.sender import Publisher

VOCABULARY, TEMPERATURE, LENGTH = 97, 0.7, 24
PROMPTS = [tuple(range(3, 3 + length)) for length in (2, 2 * WINDOW, 40)]


def engine_of(kind: str, folder: Path) -> Engine:
    if kind == "torch":
        return TorchEngine.from_folder(folder, max_concurrent=8)
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

    return VLLMEngine(folder, max_concurrent=8, max_context=80, engine_args={"kv_cache_memory_bytes": 32 << 20})


def sampled(engine: Engine) -> SequenceBatch:
    """Two responses to each prompt, with the engine's log-probs."""
    requests = [
        GenerationRequest(named(f"{p}-{i}"), prompt, SamplingSettings(TEMPERATURE, 1.0, 0, LENGTH, ()), 10 * p + i)
        for p, prompt in enumerate(PROMPTS)
        for i in range(2)
    ]
    results = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        results.update((result.id, result) for result in engine.step())
    tokens = [results[request.id].tokens for request in requests]
    pieces = [part for q, t in zip(requests, tokens, strict=True) for part in (np.array(q.prompt_ids), t.ids)]
    log_probs = np.concatenate([t.log_probs for t in tokens])
    return SequenceBatch(
        token_ids=np.concatenate(pieces).astype(np.int32),
        prompt_lengths=np.array([len(request.prompt_ids) for request in requests]),
        response_lengths=np.array([len(t.ids) for t in tokens]),
        mask=np.ones(len(log_probs), dtype=np.bool_),
        rollout_log_probs=log_probs,
        old_log_probs=log_probs,
        advantages=np.where(np.arange(len(log_probs)) // LENGTH % 2, 1.0, -1.0).astype(np.float32),
    )


def scored(rank: LearnerRank, batch: SequenceBatch) -> np.ndarray:
    work = cut_for(batch, [range(len(batch))], ranks=1, token_budget=100)
    streams = rank.score(work.shares[0], ScoreRequest(TEMPERATURE, log_probs=True)).streams
    return work.merge(batch, [streams["log_probs"]])


def theirs_of(model: PreTrainedModel, batch: SequenceBatch, log_probs_of: Callable[..., np.ndarray]) -> np.ndarray:
    """By transformers' own forward pass, one sequence at a time."""
    parts, start = [], 0
    for prompt, response in zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True):
        ids = tuple(batch.token_ids[start : start + prompt + response].tolist())
        parts.append(log_probs_of(model, ids[:prompt], ids[prompt:], TEMPERATURE))
        start += prompt + response
    return np.concatenate(parts)


@pytest.mark.slow(stands_for=["[gemma2-torch]", "[gemma3_text-torch]"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("gemma2", "torch"),
        ("gemma3_text", "torch"),
        pytest.param("gemma2", "vllm", marks=pytest.mark.vllm),
        pytest.param("gemma3_text", "vllm", marks=pytest.mark.vllm),
        pytest.param("qwen3_moe", "vllm", marks=pytest.mark.vllm),
    ],
)
def test_an_update_arrives_and_log_probs_are_the_learners_before_and_after(
    family: str, kind: str, tmp_path: Path, log_probs_of: Callable[..., np.ndarray]
) -> None:
    folder, exported = tmp_path / "model", tmp_path / "exported"
    made = mixture(VOCABULARY, seed=3) if family == "qwen3_moe" else gemma(family, vocabulary=VOCABULARY, seed=3)
    made.save_pretrained(folder)
    optimizer = OptimizerSettings(learning_rate=3e-3)
    rank = Fsdp2().start(LearnerSettings(folder, actor=optimizer, micro_batch_tokens=100), 0)
    engine = engine_of(kind, folder)
    publisher = Publisher(1 << 16, "127.0.0.1")
    link = WeightLink(publisher.address, 1, ("the learner", "engine 0"))
    try:
        before = sampled(engine)
        assert before.rollout_log_probs is not None
        np.testing.assert_allclose(scored(rank, before), before.rollout_log_probs, rtol=0, atol=1e-5)

        share = cut_for(before, [range(len(before))], ranks=1, token_budget=100).shares[0]
        rank.update(share, LossSettings(temperature=TEMPERATURE))
        moved = scored(rank, before)
        assert np.abs(moved - before.rollout_log_probs).max() > 0.05
        with ThreadPoolExecutor(1) as sender:
            connected = sender.submit(publisher.connect, link, 30)
            engine.join_weights(link, 1, 30)
            connected.result(30)
            published = dict(rank.named_parameters_for_publish())
            sent = sender.submit(publisher.publish, describe(published.items()), published.items(), 1, 30)
            engine.receive_weights(1, 30)
            sent.result(30)
        assert engine.manifest == manifest_of(published.items())

        after = sampled(engine)
        assert after.rollout_log_probs is not None
        np.testing.assert_allclose(scored(rank, after), after.rollout_log_probs, rtol=0, atol=1e-5)
        pairs = [(PROMPTS[2], tuple(before.token_ids[-LENGTH:].tolist()))]
        np.testing.assert_allclose(engine.score(pairs, TEMPERATURE)[0], moved[-LENGTH:], rtol=0, atol=1e-5)
        # What is exported is that model too, by transformers' own attention.
        exported.mkdir()
        rank.export(exported)
        plain = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
        theirs = theirs_of(plain, after, log_probs_of)
        np.testing.assert_allclose(theirs, after.rollout_log_probs, rtol=0, atol=1e-5)
    finally:
        engine.close()
