"""Memory for long streams on a CPU, where getting it costs more than filling it.

A large block is fresh from the operating system each time: its pages of 4 KiB are zeroed one by one at a tenth of the
memory's speed, and go back when the block is freed. Results get larger pages here, and what is needed on the way is
used again for the next piece. On a GPU torch keeps freed memory, and none of this changes anything.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def fresh(like: Tensor) -> Tensor:
    """Uninitialised, with the shape, type and device of ``like``."""
    if like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64):
        # NumPy asks for pages of 2 MiB, torch does not.
        return torch.from_numpy(np.empty(like.shape, np.float32 if like.dtype == torch.float32 else np.float64))
    return torch.empty_like(like)


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
