"""A fast checksum of a tensor's bytes, the same on every device.

64-bit words are laid out in rows of ``_BLOCK`` and added up along rows and along columns; the sums of either are
mixed, and added with different odd weights. That costs two additions and no multiplication per word. A byte that
differs, a block that is missing, doubled or stale, and words that change places show: two words of one row change the
sums of two columns, two words of different rows those of two rows. It guards against mistakes, not against an
adversary.

A small tensor is hashed as a whole: a dozen operations on it take longer than that, and a small model has nothing else.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_SMALL = 1 << 16
"""Bytes."""
_BLOCK = 4096
_ROWS_IN_CACHE = 32
"""On CPUs both sums are taken of so many rows while they are in the cache: memory is read once, in 0.6 of the time."""
_PIECE = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Words whose intermediate results exist at once: 6 MB of them, which a CPU's cache holds, or 100 MB."""
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_64_BITS = 2**64 - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """64 bits that depend on every byte of a contiguous ``tensor`` and on where it stands."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if data.numel() <= _SMALL:
        return int.from_bytes(hashlib.blake2b(data.cpu().numpy().tobytes(), digest_size=8).digest(), "little")
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    blocked = words.numel() // _BLOCK * _BLOCK
    rows, rest = words[:blocked].view(-1, _BLOCK), words[blocked:]
    columns, sums = _along_both(rows)
    columns[: len(rest)] += rest
    tail = data[whole:].to(torch.int64)
    first = _weighted(columns)
    second = _weighted(torch.cat((sums, rest.sum()[None], tail)))
    # A changed word is in both; turned against each other, they cannot cancel it.
    first, second = (number & _64_BITS for number in torch.stack((first, second)).tolist())
    return int(first ^ ((second << 32 | second >> 32) & _64_BITS))


def _along_both(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the columns ``[_BLOCK]`` and of the rows of ``rows [R, _BLOCK]``."""
    if rows.device.type != "cpu":
        return rows.sum(0), rows.sum(-1)
    columns = torch.zeros(_BLOCK, dtype=torch.int64)
    sums = torch.empty(len(rows), dtype=torch.int64)
    for piece, here in zip(rows.split(_ROWS_IN_CACHE), sums.split(_ROWS_IN_CACHE), strict=True):
        columns += piece.sum(0)
        torch.sum(piece, -1, out=here)
    return columns, sums


def _weighted(sums: Tensor) -> Tensor:
    weights = (2 * torch.arange(len(sums), device=sums.device) + 1) * _GOLDEN
    spread = sums * weights
    # The uppermost bit of a word is the uppermost bit of its sum, too, whatever the weight: those of two would cancel.
    return ((spread ^ (spread >> 32)) * weights).sum()


def sum_in_any_order(tensor: Tensor) -> int:
    """64 bits that are the same for the same numbers in whatever order. Takes several
    times as long as ``checksum``: to find a cause with, not to look in every step."""
    words = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    # In pieces: whole, it would take six times the memory of the tensor.
    for piece in words.split(_PIECE[words.device.type]):
        # Spread first: plain sums of patterns that differ in one bit each are often equal.
        spread = piece.to(torch.int64) * _GOLDEN
        total += (spread ^ (spread >> 29)).sum()
    return int(total) & _64_BITS
