"""Learner and vLLM both in bfloat16, as on a GPU, at 2,000 tokens: samples, an update, samples of the new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from cut_for import cut_for
from small_episodes import named
from transformers import PreTrainedModel

from rljob_trainer.episodes.requests import GenerationRequest, SamplingSettings
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.protocol import LossSettings, ScoreRequest, SequenceBatch
from rljob_trainer.learner.rank import LearnerRank
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.stores import serve_store
from rljob_trainer.weights.manifest import Manifest

if TYPE_CHECKING:
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

pytestmark = pytest.mark.vllm
PROMPT, RESPONSE, CONTEXT, SEQUENCES = 1950, 50, 2000, 4


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    model = make_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:  # sharp attention, which notices where a token stands
            layer.self_attn.q_proj.weight.mul_(6)
    model.config.max_position_embeddings = CONTEXT
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rank(folder: Path) -> Iterator[LearnerRank]:
    """In half precision a learner has a process group, of which vLLM, in the same process here, makes its own."""
    store, address = serve_store("127.0.0.1")
    del store
    settings = LearnerSettings(folder, dtype="bfloat16", actor=OptimizerSettings(learning_rate=1e-2))
    rank = Fsdp2().start(settings, address=address)
    yield rank
    rank.close()


@pytest.fixture(scope="module")
def engine(folder: Path, rank: LearnerRank) -> Iterator[VLLMEngine]:
    from rljob_trainer.rollout.vllm_engine import VLLMEngine

    arguments = {"kv_cache_memory_bytes": 32 << 20}
    engine = VLLMEngine(folder, dtype="bfloat16", max_concurrent=SEQUENCES, max_context=CONTEXT, engine_args=arguments)
    yield engine
    engine.close()


def sampled(engine: VLLMEngine) -> tuple[SequenceBatch, np.ndarray]:
    """Responses at the end of the context, and the log-probs that the engine gave their tokens."""
    prompts = np.random.default_rng(0).integers(0, 97, (SEQUENCES, PROMPT))
    for index, prompt in enumerate(prompts):
        settings = SamplingSettings(1.0, 1.0, 0, RESPONSE, ())
        engine.add(GenerationRequest(named(str(index)), tuple(prompt.tolist()), settings, seed=index))
    results = {}
    while engine.has_work:
        results |= {int(result.id.purpose): result for result in engine.step()}
    ids = [part for index, prompt in enumerate(prompts) for part in (prompt, results[index].tokens.ids)]
    batch = SequenceBatch(
        np.concatenate(ids).astype(np.int32),
        np.full(SEQUENCES, PROMPT),
        np.full(SEQUENCES, RESPONSE),
        np.ones(SEQUENCES * RESPONSE, np.bool_),
        advantages=np.ones(SEQUENCES * RESPONSE, np.float32),
    )
    return batch, np.concatenate([results[index].tokens.log_probs for index in range(SEQUENCES)])


def scored(rank: LearnerRank, batch: SequenceBatch) -> np.ndarray:
    work = cut_for(batch, [range(len(batch))], ranks=1, token_budget=rank.settings.micro_batch_tokens)
    streams = rank.score(work.shares[0], ScoreRequest(log_probs=True)).streams
    return work.merge(batch, [streams["log_probs"]])


@pytest.mark.slow(
    stands_for="tests/trainer/rollout/test_vllm_engine.py::test_the_learner_gives_what_was_sampled_the_log_probs_that_the_engine_reports"
)
def test_both_agree_at_the_end_of_2000_tokens_before_and_after_an_update(engine: VLLMEngine, rank: LearnerRank) -> None:
    """Rotary frequencies that one of them had rounded to bfloat16 would make it 0.2 nats."""
    batch, log_probs = sampled(engine)
    first = scored(rank, batch)
    assert np.abs(log_probs - first).mean() < 0.05
    work = cut_for(batch, [range(len(batch))], ranks=1, token_budget=rank.settings.micro_batch_tokens)
    rank.update(work.shares[0], LossSettings())
    assert np.abs(scored(rank, batch) - first).mean() > 0.5  # other weights, beyond all rounding
    engine.begin_update()
    engine.load(rank.named_parameters_for_publish())
    engine.finish_update(1, Manifest([]))
    batch, log_probs = sampled(engine)
    assert np.abs(log_probs - scored(rank, batch)).mean() < 0.05
