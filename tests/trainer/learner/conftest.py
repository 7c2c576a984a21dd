"""A tiny model folder, batches of random sequences, and a pool of processes that play ranks over gloo."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray import cloudpickle
from tiny_gemma import gemma
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging
from tree_batch import batch_of

from rljob_trainer.learner.protocol import SequenceBatch

VOCABULARY = 50
SECONDS = 300
"""Compilers of C++ on a machine that others use as well have needed more than 120."""


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 with biases, grouped heads and tied embeddings, in float32, with a tokenizer."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    folder = tmp_path_factory.mktemp("tied")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with a separate output matrix, stored in bfloat16."""
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    folder = tmp_path_factory.mktemp("untied")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gemma_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 2 with windows and caps, whose layers are transformers' own on every device."""
    folder = tmp_path_factory.mktemp("gemma")
    gemma("gemma2", vocabulary=VOCABULARY).save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., SequenceBatch]:
    return _make_batch


def _make_batch(groups: int = 6, samples: int = 4, seed: int = 0, longest: int = 12) -> SequenceBatch:
    """Groups of different prompts; responses of length 0, 1 and more; a mask with holes; every stream."""
    rng = np.random.default_rng(seed)
    sequences = []
    for group in range(groups):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, longest)).astype(np.int32)
        for sample in range(samples):
            length = (0, 1)[sample] if group == 0 and sample < 2 else int(rng.integers(2, longest))
            sequences.append((prompt, rng.integers(0, VOCABULARY, length).astype(np.int32)))
    return batch_of(sequences, rng, unmasked=0.9)


class Ranks:
    """Four processes that wait for work. ``run(2, f, x)`` calls ``f(rank, address, x)`` in two of them at once."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["rljob_trainer.learner.rank"])
        self._pipes: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        self._start()

    def _start(self) -> None:
        for _ in range(4):
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, count: int, function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
        module = sys.modules.get(function.__module__)
        if module is not None and module.__name__ != __name__:
            cloudpickle.register_pickle_by_value(module)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        for rank, pipe in enumerate(self._pipes[:count]):
            # With the environment as it is now: some tests have a store's address and credentials in it.
            pipe.send_bytes(cloudpickle.dumps((function, rank, address, args, dict(os.environ))))
        answers: dict[int, tuple[bool, Any]] = {}
        failed: list[str] = []
        while len(answers) < count:
            waiting = {self._pipes[rank]: rank for rank in range(count) if rank not in answers}
            ready = wait(list(waiting), timeout=seconds)
            if not ready:
                # The next test has others, and no answer of this one's.
                self.close()
                self._start()
                raise AssertionError(f"ranks {sorted(waiting.values())} of {count} hang")
            for pipe in ready:
                rank = waiting[pipe]
                answers[rank] = ok, value = cloudpickle.loads(pipe.recv_bytes())
                if not ok:
                    failed.append(f"rank {rank} of {count} failed:\n{value}")
        # The first to fail is the cause; the others then hang in a collective until its timeout.
        assert not failed, failed[0]
        return [answers[rank][1] for rank in range(count)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes.clear()
        self._pipes.clear()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        function, rank, address, args, environment = cloudpickle.loads(pipe.recv_bytes())
        os.environ.update(environment)
        try:
            answer = (True, function(rank, address, *args))
        except BaseException:  # noqa: BLE001 (it is the parent's test that fails)
            answer = (False, traceback.format_exc())
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        pipe.send_bytes(cloudpickle.dumps(answer))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()
