"""Tensor parallelism: several ranks compute every layer together, each with a part of its matrices.

Of each pair of products the first one's outputs are divided and with them the second one's inputs (Megatron-LM,
arXiv:1909.08053), so that between the two a rank needs nothing of its neighbours:

    attention      my heads' rows of the q, k, v matrices, then my columns of the output matrix    one sum of rows
    feed-forward   my rows of the gate and up matrices, then my columns of the down matrix         one sum of rows
    embedding      my words; the others' rows are zero                                             one sum of rows
    output head    the logits of my words (``vocabulary.py``)                                      numbers of tokens

What comes in is the same on all ranks, and what goes out is. In the backward pass it is the other way round: the
gradient of what came in is a part on each rank, and summed (``entering``); that of a sum goes to all as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """The ranks that compute layers together, and this one's place among them."""

    group: dist.ProcessGroup
    size: int
    index: int

    def part(self, length: int) -> slice:
        """Which of ``length`` rows or columns this rank has; parts differ by one at most."""
        return slice(self.index * length // self.size, (self.index + 1) * length // self.size)

    def longest(self, length: int) -> int:
        """The most rows of ``length`` that any rank has."""
        return -(-length // self.size)

    def entering(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, which all ranks have alike and each computes something else of: its gradient is the sum of theirs."""
        entered: torch.Tensor = _entering(x, self.group)
        return entered

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' ``x``, on all of them. The gradient of each summand is that of the sum."""
        total: torch.Tensor = _summed(x, self.group)
        return total

    def joined(self, part: torch.Tensor, dimension: int, length: int) -> torch.Tensor:
        """The ranks' parts along a ``dimension`` put together, which is of that ``length`` then. Without gradients."""
        sent = part.movedim(dimension, 0)
        rows = self.longest(length)
        padded = sent.new_empty(rows, *sent.shape[1:])
        padded[: len(sent)] = sent
        received = padded.new_empty(self.size, *padded.shape)
        dist.all_gather_single(received.view(-1, *padded.shape[1:]), padded, group=self.group)
        # One matrix beside what was received, which may be gigabytes.
        whole = part.new_empty(*part.shape[:dimension], length, *part.shape[dimension + 1 :])
        for rank in range(self.size):
            start, stop = rank * length // self.size, (rank + 1) * length // self.size
            whole.narrow(dimension, start, stop - start).copy_(received[rank, : stop - start].movedim(0, dimension))
        return whole


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _sum(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """A new tensor; of nothing, which all ranks have then, nobody is asked."""
    total = x.clone(memory_format=torch.contiguous_format)
    if total.numel():
        dist.all_reduce(total, group=group)
    return total


_entering: Callable[..., torch.Tensor] = _Entering.apply
_summed: Callable[..., torch.Tensor] = _Summed.apply
