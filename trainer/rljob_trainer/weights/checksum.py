"""A fast checksum of a tensor's bytes, the same on every device.

64-bit words are laid out in rows of ``_BLOCK`` and added up along rows and along columns; the sums of either are
added with different odd weights. That costs two passes over memory and no multiplication per word. A byte that differs,
a block that is missing, doubled or stale, and words that change places show: two words of one row change the sums of
two columns, two words of different rows those of two rows. It guards against mistakes, not against an adversary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 4096
_PIECE = 1 << 22
"""Words whose intermediate results exist at once: 100 MB of them."""
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_64_BITS = 2**64 - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """64 bits that depend on every byte of a contiguous ``tensor`` and on where it stands."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    blocked = words.numel() // _BLOCK * _BLOCK
    rows, rest = words[:blocked].view(-1, _BLOCK), words[blocked:]
    columns = rows.sum(0)
    columns[: len(rest)] += rest
    tail = data[whole:].to(torch.int64)
    first = _weighted(columns)
    second = _weighted(torch.cat((rows.sum(-1), rest.sum()[None], tail)))
    # A changed word is in both; turned against each other, they cannot cancel it.
    first, second = (number & _64_BITS for number in torch.stack((first, second)).tolist())
    return int(first ^ ((second << 32 | second >> 32) & _64_BITS))


def _weighted(sums: Tensor) -> Tensor:
    weights = (2 * torch.arange(len(sums), device=sums.device) + 1) * _GOLDEN
    return (sums * weights).sum()


def sum_in_any_order(tensor: Tensor) -> int:
    """64 bits that are the same for the same numbers in whatever order."""
    words = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    # In pieces: whole, it would take six times the memory of the tensor.
    for piece in words.split(_PIECE):
        # Spread first: plain sums of patterns that differ in one bit each are often equal.
        spread = piece.to(torch.int64) * _GOLDEN
        total += (spread ^ (spread >> 29)).sum()
    return int(total) & _64_BITS
