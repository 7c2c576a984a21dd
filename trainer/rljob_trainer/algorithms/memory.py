"""Memory for long streams on a CPU, where getting it costs more than filling it.

A large block is fresh from the operating system each time: its pages of 4 KiB are zeroed one by one at a tenth of the
memory's speed, and go back when the block is freed. Results get larger pages here, and those of results that nobody
holds any more; what is needed on the way is used again for the next piece. On a GPU torch keeps freed memory, and none
of this changes anything.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LARGE = 1 << 22
"""Bytes from which memory is kept: the allocator does that itself for smaller blocks."""
MOST_SPARE = 1 << 28
"""Bytes that are kept for coming results, at most."""

Block = npt.NDArray[np.uint8]


class Spare:
    """Memory of results that are gone, for those to come. Blocks return when the last tensor on them is gone.

    Any thread may take, and a block may return in the middle of it: each line that changes something is one operation.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: dict[int, Block] = {}  # the oldest first

    @property
    def bytes(self) -> int:
        return sum(block.nbytes for block in list(self._free.values()))

    def take(self, shape: torch.Size, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """An uninitialised array."""
        size = shape.numel() * dtype.itemsize
        block = self._fitting(size)
        array = block[:size].view(dtype).reshape(shape)
        weakref.finalize(array, self._give, block).atexit = False
        return array

    def _fitting(self, size: int) -> Block:
        for key, block in list(self._free.items()):
            if size <= block.nbytes <= 2 * size and self._free.pop(key, None) is not None:
                return block
        return np.empty(size, np.uint8)  # NumPy asks for pages of 2 MiB, torch does not

    def _give(self, block: Block) -> None:
        self._free[id(block)] = block
        for key in list(self._free):
            if self.bytes <= self._most:
                break
            self._free.pop(key, None)


_spare = Spare(MOST_SPARE)


def fresh(like: Tensor) -> Tensor:
    """Uninitialised, with the shape, type and device of ``like``."""
    if like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64) and like.nbytes >= LARGE:
        dtype = np.dtype(np.float32 if like.dtype == torch.float32 else np.float64)
        return torch.from_numpy(_spare.take(like.shape, dtype))
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
