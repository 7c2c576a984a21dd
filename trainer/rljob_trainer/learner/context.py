"""Context parallelism: several ranks compute one row together, each a part of its tokens.

Everything but attention works token by token, so a rank needs its own tokens only: with P ranks, N / P of a row's N. In
attention the parts change their meaning (DeepSpeed-Ulysses, arXiv:2309.14509): an all-to-all turns "all heads of my
tokens" into "my heads of all tokens", attention over the packed row runs as on one rank with 1 / P of the heads, and a
second all-to-all turns its output back. Shared prompts, windows and the kernels are untouched by it, and the work is
even whatever the lengths are.

    rows       N / P tokens, H heads        embedding, projections, feed-forward, norms, head
    attention  N tokens, H / P heads        two all-to-alls around it, in each layer
    streams    all response tokens          what a rank has computed for its own ones, put together (``Whole``)

A token's log-prob comes from the rank that has the row before it. Streams are put together before the loss, so that
losses over whole sequences see them whole: every rank of the group computes the same loss, and its backward pass goes
into its own tokens alone. Added up over the ranks, as sharded parameters' gradients are, that is the gradient of one
process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rljob_trainer.learner.moves import upload
from rljob_trainer.learner.protocol import Int64Array


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that share rows, and this one's place among them."""

    group: dist.ProcessGroup
    size: int
    index: int

    def part(self, rows: int) -> slice:
        """Which of a row's tokens this rank has. ``rows`` is a multiple of the number of ranks (``RowRules``)."""
        own = rows // self.size
        if own * self.size != rows:
            raise ValueError(f"a row of {rows} tokens cannot be divided among {self.size} context ranks")
        return slice(self.index * own, (self.index + 1) * own)

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dim: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's heads of all tokens, from all heads of its tokens: query ``[n, H * dim]`` to
        ``[N, H / P * dim]``, key and value alike.

        Heads of keys are repeated where there are fewer than ranks. Raises ``ValueError`` when the query heads cannot
        be divided.
        """
        heads, kv_heads = query.shape[1] // dim, key.shape[1] // dim
        if heads % self.size:
            raise ValueError(f"{heads} attention heads cannot be divided among {self.size} context ranks")
        # Any number of key heads divides the query heads, and so does the smallest number that both divide.
        copies = math.lcm(kv_heads, self.size) // kv_heads
        if copies > 1:
            key, value = (x.view(len(x), kv_heads, dim).repeat_interleave(copies, 1).flatten(1) for x in (key, value))
        parts = [x.view(len(x), self.size, -1) for x in (query, key, value)]
        # One exchange for all three: [n, P, columns] to [N, columns].
        mixed: torch.Tensor = _exchanged(torch.cat(parts, 2).transpose(0, 1), self.group).flatten(0, 1)
        own_query, own_key, own_value = mixed.split([part.shape[2] for part in parts], 1)
        return own_query, own_key, own_value

    def to_rows(self, out: torch.Tensor) -> torch.Tensor:
        """All heads of this rank's tokens, from its heads of all: ``[N, H / P * dim]`` to ``[n, H * dim]``."""
        parts = out.view(self.size, -1, out.shape[1])
        received: torch.Tensor = _exchanged(parts, self.group)
        return received.transpose(0, 1).flatten(1)


@dataclass(frozen=True, slots=True)
class Whole:
    """Puts a stream together whose numbers several ranks have parts of."""

    places: torch.Tensor
    """[m] where this rank's numbers stand."""
    length: int
    """Of the whole stream."""
    group: dist.ProcessGroup

    @classmethod
    def of(
        cls, rows: Int64Array, total: int, context: Context, device: torch.device
    ) -> tuple[Whole, Int64Array, Int64Array]:
        """``rows [length]`` are the rows out of ``total`` that a stream's numbers come from. Returned with it: which
        numbers this rank has ``[m]``, and their rows counted from its first one ``[m]``."""
        part = context.part(total)
        own = np.flatnonzero((rows >= part.start) & (rows < part.stop))
        places = upload(torch.from_numpy(own), device)
        return cls(places, len(rows), context.group), own, rows[own] - part.start

    def __call__(self, *parts: torch.Tensor) -> Sequence[torch.Tensor]:
        """Whole streams ``[length]`` of the parts ``[m]``, in one exchange. The gradient of a part is that of its own
        places: every rank has the same loss."""
        whole: torch.Tensor = _put_together(torch.stack(parts), self.places, self.length, self.group)
        return whole.unbind()


class _Exchanged(torch.autograd.Function):
    """``x [P, ...]``: part p goes to rank p of the group, whose part for this rank takes its place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _exchange(grad, ctx.group), None


class _PutTogether(torch.autograd.Function):
    """``x [k, m]`` at ``places [m]`` of ``[k, length]``, and the other ranks' numbers at theirs.

    Each place has one number and zeros of all others, whose sum is that number.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor, length: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(places)
        whole = x.new_zeros(x.shape[0], length)
        whole[:, places] = x
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return grad[:, places], None, None, None


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent = x.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


_exchanged: Callable[..., torch.Tensor] = _Exchanged.apply
_put_together: Callable[..., torch.Tensor] = _PutTogether.apply
