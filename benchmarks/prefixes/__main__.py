"""Siblings whose turns are the same: a gradient with what they have in common computed once, and without.

    .venv/bin/python -m benchmarks.prefixes

Three ways take turns in the same processes: whatever sequences begin with once (ours), whole prompts once, and each
sequence by itself. One process, and two that compute each row together (``trainer.parallelism.context: 2``).
"""

from __future__ import annotations

import argparse
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch.multiprocessing as processes
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, ratios, table, write_results
from benchmarks.prefixes.ranks import WAYS, measured
from rljob_trainer.episodes.tokens import IntArray
from rljob_trainer.learner.packing import build_row
from rljob_trainer.learner.prefixes import offsets_of
from rljob_trainer.learner.protocol import SequenceBatch
from rljob_trainer.learner.settings import LearnerSettings

HERE = Path(__file__).parent
VOCABULARY = 8192


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """One shape of a tree on one number of ranks."""

    shape: str
    ranks: int
    tree: int
    """Distinct tokens of the tree."""
    rows: dict[str, int]
    """Tokens of the row, by way."""
    seconds: dict[str, MeasuredSpread]
    gains: dict[str, MeasuredSpread]
    """Seconds of the other ways over ours, pair by pair."""
    deviation: float
    """Of our gradient from that of each sequence by itself: norm of the difference over the norm, of all parameters."""


def chain(rng: np.random.Generator, turn: int) -> list[list[IntArray]]:
    """Sixteen siblings that have four turns in common, and one each of their own."""
    shared = [_text(rng, turn) for _ in range(4)]
    return [[*shared, _text(rng, turn // 2)] for _ in range(16)]


def forks(rng: np.random.Generator, turn: int) -> list[list[IntArray]]:
    """Sixteen siblings that fork in two at each of four turns."""
    leaves: list[list[IntArray]] = [[]]
    for _ in range(4):
        leaves = [[*leaf, _text(rng, turn)] for leaf in leaves for _ in range(2)]
    return leaves


SHAPES: dict[str, Callable[[np.random.Generator, int], list[list[IntArray]]]] = {
    "four turns in common": chain,
    "a fork at each of four turns": forks,
}


def _text(rng: np.random.Generator, length: int) -> IntArray:
    return rng.integers(0, VOCABULARY, length).astype(np.int32)


def batch_of(turns: list[list[IntArray]], prompt: IntArray) -> SequenceBatch:
    """A prompt and its siblings' responses; the first half of each turn is what the environment said."""
    rng = np.random.default_rng(1)
    responses = [np.concatenate(own) for own in turns]
    tokens = sum(map(len, responses))
    masks = [np.concatenate([np.arange(len(turn)) >= len(turn) // 2 for turn in own]) for own in turns]
    return SequenceBatch(
        token_ids=np.concatenate([part for response in responses for part in (prompt, response)]),
        prompt_lengths=np.full(len(turns), len(prompt)),
        response_lengths=np.array([len(response) for response in responses]),
        mask=np.concatenate(masks),
        advantages=rng.standard_normal(tokens).astype(np.float32),
        old_log_probs=np.full(tokens, -np.log(VOCABULARY), dtype=np.float32),
    )


def distinct(batch: SequenceBatch) -> int:
    """The tree's tokens that a row holds: a token with all before it, once. The last of a sequence is not held."""
    starts = offsets_of(batch.prompt_lengths + batch.response_lengths).tolist()
    ids = batch.token_ids
    return len({ids[a:n].tobytes() for a, b in pairwise(starts) for n in range(a + 1, b)})


def measure(shape: str, ranks: int, folder: Path, prompt: int, turn: int, repetitions: int) -> PrefixRow:
    rng = np.random.default_rng(0)
    batch = batch_of(SHAPES[shape](rng, turn), _text(rng, prompt))
    settings = LearnerSettings(folder, ranks=ranks, context=ranks, micro_batch_tokens=1 << 20, lanes=1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    queue = processes.get_context("spawn").SimpleQueue()
    started = processes.spawn(measured, (address, settings, batch, repetitions, queue), nprocs=ranks, join=False)
    while not started.join():
        pass
    seconds, deviation = queue.get()
    if deviation > 1e-5:
        raise RuntimeError(f"the gradients of both ways differ by {deviation:.1e}")
    every = np.arange(len(batch))
    return PrefixRow(
        shape,
        ranks,
        distinct(batch),
        {name: len(build_row(of(batch), every).source) for name, of in WAYS.items()},
        {name: MeasuredSpread.of(values) for name, values in seconds.items()},
        {name: MeasuredSpread.of(ratios(seconds[name], seconds["prefixes"])) for name in ("prompts", "apart")},
        deviation,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=64, help="tokens (default 64)")
    parser.add_argument("--turn", type=int, default=64, help="tokens (default 64)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    machine = Hardware.here()
    with tempfile.TemporaryDirectory() as scratch:
        config = Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
        )  # fmt: skip
        Qwen2ForCausalLM(config).save_pretrained(scratch)
        rows = [
            measure(shape, ranks, Path(scratch), arguments.prompt, arguments.turn, arguments.repetitions)
            for shape in SHAPES
            for ranks in (1, 2)
        ]
    body = [
        [f"{row.shape}, {row.ranks} rank{'s' if row.ranks > 1 else ''}", f"{row.tree:,}",
         *(f"{row.rows[name]:,}" for name in WAYS), *(row.seconds[name].show() for name in WAYS),
         *(f"**{row.gains[name].show('.1f')}**" for name in ("prompts", "apart")), f"{row.deviation:.0e}"]
        for row in rows
    ]  # fmt: skip
    header = ["sixteen siblings", "tokens of the tree", *(f"row, {name}" for name in WAYS),
              *(f"{name} s" for name in WAYS), "prompts / prefixes", "apart / prefixes", "deviation"]  # fmt: skip
    text = (
        "Forward and backward pass of the actor, four layers of 256 and a vocabulary of 8,192, float32, one thread a "
        f"rank; prompts and turns of {arguments.prompt} and {arguments.turn} tokens; median (smallest – largest). "
        f"Two ranks compute each row together.\n\n{table(header, body)}"
    )
    write_results(arguments.results, "prefixes", machine, {"rows": rows}, text)


if __name__ == "__main__":
    main()
