"""Sequences of different lengths in one flat vector: where each begins, and sums over each of them.

Everything in this package is a stream `[tokens]` cut into S segments by `offsets [S + 1]`; no padding exists.
A token whose mask is False takes no part in any result, whatever stands there (NaN included): functions select
with `torch.where` before they compute. This file knows nothing about rewards or policies.

A CPU is fast as long as what it works on stays in its cache: there, work without gradients goes through a long stream
in `pieces`. A GPU gets all of it at once, and nothing here makes the host wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rljob_trainer.algorithms.memory import Scratch

PIECE_TOKENS = 1 << 19
"""Tokens that a CPU works on at a time: a few float64 vectors of them fit into its cache."""


class NotFiniteError(ValueError):
    """A number of a batch, which the message names, is NaN or infinite and not to be trained on. ``row``: its sample's
    place in the batch."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


class UnfitRewardError(ValueError):
    """A reward, which the message names, is a number that the method can't use. ``row`` as above."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


def all_kept(mask: Tensor) -> bool:
    """Whether nothing is masked, as far as that can be told for nothing: False on a GPU, which would be waited for."""
    return mask.device.type == "cpu" and bool(mask.numpy().all())


def wide(stream: Tensor) -> Tensor:
    """The stream in float32 where it comes in half precision; itself otherwise. Gradients flow through.

    Sums, exponentials and differences of half-precision numbers are not what their names say: whoever computes starts
    with this.
    """
    return stream.float() if stream.dtype in (torch.bfloat16, torch.float16) else stream


def kept_only(stream: Tensor, mask: Tensor) -> Tensor:
    """The stream with 0 wherever the mask is False; the stream itself where nothing is masked."""
    if all_kept(mask):
        return stream
    if _by_bits(stream):
        return (stream.view(torch.int32) * mask).view(torch.float32)
    return torch.where(mask, stream, 0)


def keep_only_(stream: Tensor, mask: Tensor) -> Tensor:
    """`kept_only` in the stream's own memory."""
    if all_kept(mask):
        return stream
    if _by_bits(stream):
        stream.view(torch.int32).mul_(mask)
        return stream
    return stream.masked_fill_(~mask, 0)


def _by_bits(stream: Tensor) -> bool:
    """On a CPU `torch.where` goes from element to element; bits times 0 or 1 say the same ten times as fast."""
    return stream.dtype == torch.float32 and stream.device.type == "cpu" and not stream.requires_grad


def parts(stream: Tensor) -> Iterator[slice]:
    """Where to cut a stream whose tokens are worked on one by one."""
    size = PIECE_TOKENS if stream.device.type == "cpu" else max(stream.numel(), 1)
    for start in range(0, stream.numel(), size):
        yield slice(start, min(start + size, stream.numel()))


@dataclass(frozen=True, eq=False)
class Piece:
    """A run of whole sequences: which ones, where their tokens stand in the stream, and their own cuts."""

    sequences: slice
    tokens: slice
    segments: Segments


@dataclass(frozen=True, eq=False)
class Segments:
    """The cuts of a flat stream. Build it with `from_lengths` (or `from_offsets`), once for each batch.

    ``tokens`` and ``longest`` are host integers, so that nothing below waits for a GPU.
    """

    offsets: Tensor  # [S + 1] int64, offsets[0] = 0
    tokens: int
    longest: int
    shares: Tensor | None = None
    """``[S]`` what part of its episode (promptMean: of its prompt's tokens) each sequence is; None: the whole, each of
    them."""

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

    @property
    def weights(self) -> Tensor | float:
        """What sequences count for where they are averaged: their ``shares``, or 1."""
        return 1.0 if self.shares is None else self.shares

    @cached_property
    def positions(self) -> Tensor:
        """``[tokens]`` int64: 0, 1, 2 ... within each sequence."""
        return torch.arange(self.tokens, device=self.offsets.device) - self.spread(self.offsets[:-1])

    @cached_property
    def pieces(self) -> list[Piece]:
        """Runs of whole sequences with about `PIECE_TOKENS` tokens (a longer sequence is one of its own); on a GPU one.

        Work that does not look beyond a sequence can be done piece by piece.
        """
        count = len(self)
        if self.offsets.device.type != "cpu" or self.tokens <= PIECE_TOKENS:
            return [Piece(slice(0, count), slice(0, self.tokens), self)]
        offsets = self.offsets.numpy()
        found, first = [], 0
        while first < count:
            start = int(offsets[first])
            last = max(int(np.searchsorted(offsets, start + PIECE_TOKENS, side="right")) - 1, first + 1)
            end = int(offsets[last])
            own = offsets[first : last + 1] - start
            segments = Segments(torch.from_numpy(own), end - start, int(np.diff(own).max()))
            found.append(Piece(slice(first, last), slice(start, end), segments))
            first = last
        return found

    def place_of(self, token: int) -> tuple[int, int]:
        """The sequence that a token of the stream is in, and its position there. Waits for the device."""
        row = int(torch.searchsorted(self.offsets, token, right=True)) - 1
        return row, token - int(self.offsets[row])

    def spread(self, per_sequence: Tensor) -> Tensor:
        """``[S]`` to ``[tokens]``: gives each token its sequence's value."""
        if (
            per_sequence.device.type == "cpu"
            and not per_sequence.requires_grad
            and per_sequence.dtype != torch.bfloat16
        ):
            # torch would make an index of 8 bytes a token first. (NumPy knows no bfloat16.)
            return torch.from_numpy(np.repeat(per_sequence.numpy(), self.lengths.numpy()))
        return per_sequence.repeat_interleave(self.lengths, output_size=self.tokens)

    def sum(self, stream: Tensor, mask: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """``[S]``: the sum over each sequence's (masked) tokens; 0 where there is none. Adds up in float64.

        The result has the stream's dtype, if no other is asked for.
        """
        whole = mask is None or all_kept(mask)
        # Gradients flow through one operation, not one a piece.
        pieces = [Piece(slice(None), slice(None), self)] if stream.requires_grad else self.pieces
        totals = []
        for piece in pieces:
            here = stream[piece.tokens]
            if mask is not None and not whole:
                here = kept_only(here, mask[piece.tokens])
            offsets = piece.segments.offsets
            totals.append(torch.segment_reduce(here.double(), "sum", offsets=offsets, unsafe=True))
        total = torch.cat(totals) if totals else stream.new_zeros(0, dtype=torch.float64)
        return total.to(dtype or stream.dtype)

    def max(self, stream: Tensor, mask: Tensor | None = None) -> Tensor:
        """``[S]``: the largest (masked) value of each sequence; -inf where there is none."""
        kept = stream if mask is None or all_kept(mask) else torch.where(mask, stream, -torch.inf)
        return torch.segment_reduce(kept, "max", offsets=self.offsets, unsafe=True, initial=-torch.inf)

    def count(self, mask: Tensor) -> Tensor:
        """``[S]`` int64: how many tokens of each sequence the mask keeps."""
        if all_kept(mask):
            return self.lengths
        if len(self.pieces) > 1:
            return torch.cat([p.segments.count(mask[p.tokens]) for p in self.pieces])
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
    return kept_only(stream, mask).sum() / torch.count_nonzero(mask).clamp(min=1)


class SegmentSpread:
    """Mean and unbiased (Bessel) variance of masked values that are given piece by piece.

    Squares are of the distance from the piece's own mean, so that the stream's precision is enough within a piece,
    whichever value comes first; values which are all alike have variance 0 and not rounding noise. What the pieces
    found is put together in float64.
    """

    def __init__(self) -> None:
        self._scratch: Scratch | None = None
        self._found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # of each piece, [] in the stream's precision

    @torch.no_grad()
    def add(self, values: Tensor, mask: Tensor) -> None:
        """Both ``[tokens]``. A GPU, which is not asked whether anything is masked, gets everything as one piece."""
        whole = all_kept(mask)
        if values.numel() == 0 or (mask.device.type == "cpu" and not (whole or bool(mask.numpy().any()))):
            return
        if self._scratch is None:
            self._scratch = Scratch(values.device)
        shifted = self._scratch.get("shifted", values.numel(), values.dtype)
        count = torch.tensor(values.numel()) if whole else torch.count_nonzero(mask)
        mean = values.mean() if whole else keep_only_(shifted.copy_(values), mask).sum() / count.clamp(min=1)
        keep_only_(torch.sub(values, mean, out=shifted), mask)
        self._found.append((count, mean, shifted.sum(), torch.dot(shifted, shifted)))

    def _joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """How many, their mean and the squares of their distances from it: ``[]`` each, float64."""
        count, mean, rest, squares = (torch.stack(column).double() for column in zip(*self._found, strict=True))
        rest = rest / count.clamp(min=1)  # what rounding left of the mean
        mean = mean + rest
        total = count.sum()
        # From the first one, so that what is all alike stays so.
        middle = mean[0] + (count * (mean - mean[0])).sum() / total.clamp(min=1)
        apart = count * ((mean - middle).square() - rest.square())
        return total, middle, (squares + apart).sum().clamp(min=0)

    @property
    def is_finite(self) -> bool:
        """Whether all values were finite (a GPU is waited for)."""
        return not self._found or bool(self._joined()[1].isfinite())

    def normalise_(self, stream: Tensor, mask: Tensor, epsilon: float, *, keep_mean: bool = False) -> Tensor:
        """(x - mean) / sqrt(variance + epsilon), plus the mean if it is kept, in the place of ``stream``; 0 where the
        mask is False."""
        if not self._found:
            return stream.zero_()
        count, mean, squares = self._joined()
        scale = torch.rsqrt(squares / (count - 1).clamp(min=1) + epsilon).to(stream.dtype)
        centre = mean.to(stream.dtype)
        for part in parts(stream):
            scaled = stream[part].sub_(centre).mul_(scale)
            keep_only_(scaled.add_(centre) if keep_mean else scaled, mask[part])
        return stream


@torch.no_grad()
def whiten(stream: Tensor, mask: Tensor, epsilon: float = 1e-8, *, keep_mean: bool = False) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) over all masked tokens; 0 where the mask is False.

    The variance is unbiased (Bessel). A single token has variance 0, so its result is 0. With ``keep_mean`` the mean
    is added again: only the scale changes, and what lies above 0 and below it stays so on the whole.
    """
    spread = SegmentSpread()
    for part in parts(stream):
        spread.add(stream[part], mask[part])
    return spread.normalise_(stream.clone(), mask, epsilon, keep_mean=keep_mean)
