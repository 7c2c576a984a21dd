"""A torch engine and a learner rank in one process share its cores, and the rank's weights."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.publish import colocated
from rljob_trainer.rollout.actor import EngineSpec
from rljob_trainer.rollout.engine_loop import EngineLoop
from rljob_trainer.weights.manifest import manifest_of


def test_the_engine_has_half_of_the_threads_and_the_rank_and_later_threads_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM takes it away for good from a process that has had one of its engines.
    monkeypatch.setattr(torch, "set_num_threads", torch._C.set_num_threads)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=64, **shape)).save_pretrained(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    rank = Fsdp2().start(LearnerSettings(tmp_path, actor=OptimizerSettings(learning_rate=1e-3)))
    seen: list[int] = []
    try:
        colocated.start_engine(rank, EngineSpec("torch", str(tmp_path), max_concurrent=2))
        engine = rank.attachments.get(EngineLoop)
        seen.append(engine.call(lambda _: torch.get_num_threads()))
        engine.close()
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
        rank.close()
    assert seen == [2, 4, 4]


def test_an_engine_that_shares_the_ranks_weights_holds_the_manifest_of_these(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=64, **shape)).save_pretrained(tmp_path)
    rank = Fsdp2().start(LearnerSettings(tmp_path, actor=OptimizerSettings(learning_rate=1e-3)))
    colocated.start_engine(rank, EngineSpec("torch", str(tmp_path), max_concurrent=2))
    engine = rank.attachments.get(EngineLoop)
    try:
        assert engine.call(lambda inner: inner.manifest) is None
        first = colocated.take_weights(rank, 1, is_new=True)
        with torch.no_grad():
            next(rank.live_model.parameters()).add_(1.0)
        second = colocated.take_weights(rank, 2, is_new=True)
        assert second == manifest_of(rank.named_parameters_for_publish()).version(2)
        assert engine.call(lambda inner: inner.manifest).version(2) == second
        assert first.manifest_sha256 != second.manifest_sha256
    finally:
        engine.close()
        rank.close()
