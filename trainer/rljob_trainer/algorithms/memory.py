"""Memory for long streams on a CPU, where getting it costs more than filling it.

A large block is fresh from the operating system each time: its pages of 4 KiB are zeroed one by one at a tenth of the
memory's speed, and go back when the block is freed. Results get larger pages here, and what is needed on the way is
used again for the next piece. On a GPU torch keeps freed memory, and none of this changes anything.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LARGE_PAGE = 2 << 20


def fresh(like: Tensor) -> Tensor:
    """Uninitialised, with the shape, type and device of ``like``."""
    size = like.numel() * like.element_size()
    if like.device.type != "cpu" or size < 2 * LARGE_PAGE:
        return torch.empty_like(like)
    # NumPy asks for large pages where torch does not; what stands before the first border of one would get small ones.
    room = np.empty(size + LARGE_PAGE, np.uint8)
    start = -room.ctypes.data % LARGE_PAGE
    return torch.from_numpy(room[start : start + size]).view(like.dtype).view(like.shape)


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
