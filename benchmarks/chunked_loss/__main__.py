"""Log-probs and entropy of given tokens, forward and backward, with and without all logits at once.

    .venv/bin/python -m benchmarks.chunked_loss                       # 8,192 tokens x 49,152: 10 GB, 5 minutes
    .venv/bin/python -m benchmarks.chunked_loss --tokens 1024 2048 4096

The plain way is what a training script does with transformers: logits, `log_softmax`, `gather`, and the entropy from
the same tensor. Both sides take turns in one process; the peak of memory is what the operating system saw.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.machine import Hardware
from benchmarks.measuring import MeasuredSpread, interleaved, ratios, table, write_results
from benchmarks.resident import PeakMemory
from rljob_trainer.learner.logprobs import log_probs_and_entropy

HERE = Path(__file__).parent
Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(hidden [tokens, width], weight [vocabulary, width], targets [tokens]) -> log-probs and entropy, each [tokens]."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass."""

    seconds: float
    extra_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """One number of tokens."""

    tokens: int
    ours: MeasuredSpread
    plain: MeasuredSpread
    time_ratio: MeasuredSpread
    ours_extra_bytes: int
    plain_extra_bytes: int
    gradient_deviation: float


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(hidden @ weight.T, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@dataclass(frozen=True, eq=False)
class LossInputs:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor

    @staticmethod
    def make(tokens: int, vocabulary: int, width: int) -> LossInputs:
        generator = torch.Generator().manual_seed(0)
        return LossInputs(
            torch.randn(tokens, width, generator=generator, requires_grad=True),
            (torch.randn(vocabulary, width, generator=generator) * width**-0.5).requires_grad_(),
            torch.randint(vocabulary, (tokens,), generator=generator),
            torch.randn(tokens, generator=generator),
        )

    def run(self, head: Head) -> Pass:
        """A policy gradient with an entropy bonus; gradients are in the inputs afterwards."""
        self.hidden.grad = self.weight.grad = None
        with PeakMemory() as memory:
            start = time.perf_counter()
            log_probs, entropy = head(self.hidden, self.weight, self.targets)
            (-(self.advantages * log_probs).mean() - 0.01 * entropy.mean()).backward()
            seconds = time.perf_counter() - start
        return Pass(seconds, memory.extra_bytes)

    def gradients(self, head: Head) -> list[Tensor]:
        self.run(head)
        assert self.hidden.grad is not None
        assert self.weight.grad is not None
        return [self.hidden.grad.clone(), self.weight.grad.clone()]


def measure(tokens: int, vocabulary: int, width: int, repetitions: int) -> ChunkRow:
    inputs = LossInputs.make(tokens, vocabulary, width)
    pairs = list(zip(inputs.gradients(log_probs_and_entropy), inputs.gradients(plain), strict=True))
    deviation = max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
    if deviation > 1e-3:
        raise RuntimeError(f"the gradients of both ways differ by {deviation:.1e} of the largest")
    del pairs
    sides: dict[str, Head] = {"chunks": log_probs_and_entropy, "plain": plain}
    runs = interleaved(
        {name: (lambda _, head=head: inputs.run(head)) for name, head in sides.items()},  # type: ignore[misc]
        repetitions,
    )
    ours, theirs = ([run.seconds for run in runs[name]] for name in sides)
    return ChunkRow(
        tokens,
        MeasuredSpread.of(ours),
        MeasuredSpread.of(theirs),
        MeasuredSpread.of(ratios(ours, theirs)),
        max(run.extra_bytes for run in runs["chunks"]),
        max(run.extra_bytes for run in runs["plain"]),
        deviation,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576, help="hidden size (default 576, as SmolLM2-135M)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    machine = Hardware.here()
    rows = [
        measure(tokens, arguments.vocabulary, arguments.width, arguments.repetitions) for tokens in arguments.tokens
    ]
    body = [
        [f"{row.tokens:,}", row.ours.show(), row.plain.show(), f"**{row.time_ratio.show()}**",
         f"{row.ours_extra_bytes / 1e6:,.0f}", f"{row.plain_extra_bytes / 1e6:,.0f}",
         f"**{row.plain_extra_bytes / row.ours_extra_bytes:.1f}**", f"{row.gradient_deviation:.0e}"]
        for row in rows
    ]  # fmt: skip
    header = ["tokens", "chunks s", "plain s", "chunks / plain", "chunks MB", "plain MB", "times less",
              "gradient deviation"]  # fmt: skip
    text = (
        f"Vocabulary {arguments.vocabulary:,}, hidden {arguments.width}, float32, {arguments.threads} threads; median "
        "(smallest – largest); memory is the peak beyond the inputs, the gradient of the weight (a matrix as large as "
        f"it: {4e-6 * arguments.vocabulary * arguments.width:.0f} MB) in it on both sides.\n\n{table(header, body)}"
    )
    write_results(arguments.results, "chunked_loss", machine, {"threads": arguments.threads, "rows": rows}, text)


if __name__ == "__main__":
    main()
