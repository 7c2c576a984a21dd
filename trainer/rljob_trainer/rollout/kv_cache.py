"""The static key-value cache of the torch engine: fixed rows, one per running sequence.

Two tensors ``[layers, rows, kv heads, capacity, D]``. The first n rows are in use; a row that becomes free is filled by
moving the last one, so attention always reads a plain slice. Memory beyond the longest sequence seen is never touched,
so the operating system never has to provide it.
"""

from __future__ import annotations

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor


def quarter_of_free_memory(device: torch.device) -> int:
    """Bytes for a cache when nobody said how many."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] // 4)
    return int(psutil.virtual_memory().available // 4)


class KVCache:
    """``rows`` sequences of at most ``capacity`` tokens."""

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows, self.capacity = rows, capacity
        self._kv_heads, self._head_dim = kv_heads, head_dim
        shape = (layers, rows, kv_heads, capacity, head_dim)
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)
        # As a list of [rows * kv heads * capacity, D]: a token of one head is one row of it.
        self._flat = [
            (keys.view(-1, head_dim), values.view(-1, head_dim))
            for keys, values in zip(self._keys, self._values, strict=True)
        ]
        heads = torch.arange(rows * kv_heads, device=device).view(rows, kv_heads)
        self._first_cell = heads * capacity
        self._columns = torch.arange(capacity, device=device)
        self._defined = 0
        """Columns below this hold finite numbers in every row in use: a masked column still enters products,
        and what an allocator left there may be NaN."""

    @staticmethod
    def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * kv_heads * head_dim * dtype.itemsize

    def write_rows(self, layer: int, rows: slice, keys: Tensor, values: Tensor) -> None:
        """Starts ``rows`` with keys and values ``[m, kv heads, S, D]``."""
        length = keys.shape[2]
        for cache, new in ((self._keys, keys), (self._values, values)):
            cache[layer, rows, :, :length] = new
            cache[layer, rows, :, length : self._defined] = 0

    def define(self, rows: int, length: int) -> None:
        """Makes the first ``rows`` rows readable up to ``length``; call it before ``write_rows`` adds longer ones."""
        if length > self._defined:
            new = min(max(length, self._defined + 64), self.capacity)
            self._keys[:, :rows, :, self._defined : new] = 0
            self._values[:, :rows, :, self._defined : new] = 0
            self._defined = new

    def clear(self) -> None:
        """No row is in use any more."""
        self._defined = 0

    def cells(self, positions: Tensor) -> Tensor:
        """Where the tokens at ``positions [n]`` of the first n rows lie: ``[n * kv heads]``."""
        return (self._first_cell[: positions.shape[0]] + positions[:, None]).view(-1)

    def bias(self, positions: Tensor, longest: int, window: int | None = None) -> Tensor:
        """``[n * kv heads, 1, longest]``: 0 up to and including each row's position, minus infinity beyond, and before
        the last ``window`` of them."""
        columns = self._columns[:longest]
        hidden = columns > positions[:, None]
        if window is not None:
            hidden |= columns <= positions[:, None] - window
        bias = torch.zeros(hidden.shape, dtype=self._keys.dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return bias[:, None].expand(-1, self._kv_heads, -1).reshape(-1, 1, longest)

    def append(
        self, layer: int, cells: Tensor, keys: Tensor, values: Tensor, rows: int, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Stores one token per row, ``[n, kv heads, D]``; returns keys and values ``[n * kv heads, longest, D]``."""
        flat_keys, flat_values = self._flat[layer]
        flat_keys.index_copy_(0, cells, keys.reshape(-1, self._head_dim))
        flat_values.index_copy_(0, cells, values.reshape(-1, self._head_dim))
        return (
            self._keys[layer, :rows, :, :longest].flatten(0, 1),
            self._values[layer, :rows, :, :longest].flatten(0, 1),
        )

    def move(self, source: list[int], target: list[int]) -> None:
        """Copies rows onto other rows."""
        for cache in (self._keys, self._values):
            for a, b in zip(source, target, strict=True):
                cache[:, b, :, : self._defined] = cache[:, a, :, : self._defined]

    def take_over(self, other: KVCache, rows: int) -> None:
        """Starts with the first ``rows`` rows of another cache of the same model."""
        self._defined = other._defined
        self._keys[:, :rows, :, : self._defined] = other._keys[:, :rows, :, : self._defined]
        self._values[:, :rows, :, : self._defined] = other._values[:, :rows, :, : self._defined]
