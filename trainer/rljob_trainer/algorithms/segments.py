"""Sequences of different lengths in one flat vector: where each begins, and sums over each of them.

Everything in this package is a stream `[tokens]` cut into S segments by `offsets [S + 1]`; no padding exists.
A token whose mask is False takes no part in any result, whatever stands there (NaN included): functions select
with `torch.where` before they compute. This file knows nothing about rewards or policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """The cuts of a flat stream. Build it with `from_lengths` (or `from_offsets`), once for each batch.

    ``tokens`` and ``longest`` are host integers, so that nothing below waits for a GPU.
    """

    offsets: Tensor  # [S + 1] int64, offsets[0] = 0
    tokens: int
    longest: int

    @staticmethod
    def from_lengths(lengths: Sequence[int] | Tensor, device: torch.device | str | None = None) -> Segments:
        """From the number of tokens of each sequence ``[S]`` (list, NumPy array or tensor); 0 is allowed."""
        host = torch.as_tensor(lengths, dtype=torch.int64).reshape(-1).cpu()
        if host.numel() and int(host.min()) < 0:
            raise ValueError(f"lengths of sequences must not be negative, but the smallest is {int(host.min())}")
        offsets = torch.zeros(host.numel() + 1, dtype=torch.int64)
        torch.cumsum(host, 0, out=offsets[1:])
        target = device if device is not None else (lengths.device if isinstance(lengths, Tensor) else None)
        return Segments(offsets.to(target), int(offsets[-1]), int(host.max()) if host.numel() else 0)

    @staticmethod
    def from_offsets(offsets: Tensor) -> Segments:
        """From ``offsets [S + 1]`` (int64, ascending, beginning with 0)."""
        if offsets.ndim != 1 or offsets.numel() < 1 or int(offsets[0]) != 0:
            raise ValueError("offsets must be a vector [S + 1] that begins with 0")
        return Segments.from_lengths(offsets.diff(), offsets.device)

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @cached_property
    def lengths(self) -> Tensor:
        """``[S]`` int64."""
        return self.offsets.diff()

    @cached_property
    def positions(self) -> Tensor:
        """``[tokens]`` int64: 0, 1, 2 ... within each sequence."""
        return torch.arange(self.tokens, device=self.offsets.device) - self.spread(self.offsets[:-1])

    def spread(self, per_sequence: Tensor) -> Tensor:
        """``[S]`` to ``[tokens]``: gives each token its sequence's value."""
        return per_sequence.repeat_interleave(self.lengths, output_size=self.tokens)

    def sum(self, stream: Tensor, mask: Tensor | None = None) -> Tensor:
        """``[S]``: the sum over each sequence's (masked) tokens; 0 where there is none. Adds up in float64."""
        kept = stream if mask is None else torch.where(mask, stream, 0)
        total = torch.segment_reduce(kept.double(), "sum", offsets=self.offsets, unsafe=True)
        return total.to(stream.dtype)

    def max(self, stream: Tensor, mask: Tensor | None = None) -> Tensor:
        """``[S]``: the largest (masked) value of each sequence; -inf where there is none."""
        kept = stream if mask is None else torch.where(mask, stream, -torch.inf)
        return torch.segment_reduce(kept, "max", offsets=self.offsets, unsafe=True, initial=-torch.inf)

    def count(self, mask: Tensor) -> Tensor:
        """``[S]`` int64: how many tokens of each sequence the mask keeps."""
        running = torch.zeros(self.tokens + 1, dtype=torch.int32, device=mask.device)  # half the memory of int64
        torch.cumsum(mask, 0, out=running[1:])
        return running.index_select(0, self.offsets).diff().long()

    def mean(self, stream: Tensor, mask: Tensor) -> Tensor:
        """``[S]``: the mean over each sequence's masked tokens; 0 where there is none."""
        return self.sum(stream, mask) / self.count(mask).clamp(min=1)

    def is_last(self, mask: Tensor) -> Tensor:
        """``[tokens]`` bool: True at the last masked token of each sequence."""
        rank = torch.cumsum(mask, 0, dtype=torch.int32)
        ends = torch.cat([rank.new_zeros(1), rank]).index_select(0, self.offsets[1:])
        return mask & (rank == self.spread(ends))


def masked_mean(stream: Tensor, mask: Tensor) -> Tensor:
    """The mean ``[]`` over all masked tokens; 0 if there is none."""
    return torch.where(mask, stream, 0).sum() / mask.sum().clamp(min=1)


def whiten(stream: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) over all masked tokens; 0 where the mask is False.

    The variance is unbiased (Bessel). A single token has variance 0, so its result is 0. Measured from the smallest
    value, so that a stream whose tokens are all alike gives exactly 0 and not rounding noise over sqrt(epsilon).
    """
    if stream.numel() == 0:
        return stream
    count = mask.sum()
    shifted = torch.where(mask, stream - torch.where(mask, stream, torch.inf).amin(), 0)
    centred = torch.where(mask, shifted - shifted.sum() / count.clamp(min=1), 0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + epsilon)
