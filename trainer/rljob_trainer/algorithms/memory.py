"""Memory for long streams on a CPU, where getting it costs more than filling it.

A large block is fresh from the operating system each time: its pages are zeroed one by one at a tenth of the memory's
speed, and go back when the block is freed. (Large pages are no way out: where a virtual machine gives free ones back
to its host they cost five times as much as small ones.) So a result gets the block of an earlier result that is no
longer in use, and what is needed on the way is used again for the next piece. On a GPU torch keeps freed memory
itself, and none of this changes anything.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

LARGE = 4 << 20
"""Bytes from which on a block comes from the operating system each time."""

KEPT_BLOCKS = 2
"""As many as one estimator has results: advantages and returns."""

_free: deque[Tensor] = deque(maxlen=KEPT_BLOCKS)


def fresh(like: Tensor) -> Tensor:
    """Uninitialised, with the shape, type and device of ``like``. The caller alone has it, as long as it likes."""
    size = like.numel() * like.element_size()
    if like.device.type != "cpu" or size < LARGE:
        return torch.empty_like(like)
    block = _freed_block(size)
    if block is None:
        block = torch.empty(size, dtype=torch.uint8)
    # The tensor and every view of it hold this array, and nothing else does: its end is the end of their use.
    lent = block.numpy()
    weakref.finalize(lent, _free.append, block).atexit = False
    return torch.from_numpy(lent)[:size].view(like.dtype).view(like.shape)


def _freed_block(size: int) -> Tensor | None:
    """One with room for ``size`` bytes, at most half of it idle. Every step of this is atomic: threads may share it."""
    for _ in range(KEPT_BLOCKS):
        try:
            block = _free.popleft()
        except IndexError:
            return None
        if size <= block.numel() <= 2 * size:
            return block
        _free.append(block)
    return None


class Scratch:
    """Uninitialised vectors by name. One that is asked for again has the memory of the last one of that name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def get(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """``[count]``."""
        there = self._kept.get(name)
        if there is None or there.numel() < count or there.dtype != dtype:
            there = self._kept[name] = torch.empty(count, dtype=dtype, device=self._device)
        return there[:count]
