"""From host memory to a GPU and back, without the host waiting for what the GPU has to do first.

A copy from ordinary memory goes through the driver's own, and whoever asked for it waits until the GPU has come to it:
after all it was told before. What is pinned the GPU takes by itself. So while it computes a micro-batch the host lays
out the next one and sends it, on a stream of its own, and has time left.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch

_PINNED_FROM = 1 << 20
"""Bytes. Smaller tensors share pages of memory with others, and a page cannot be pinned twice."""

_log = logging.getLogger(__name__)


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of host memory on ``device``. The host does not wait; what it tells the device afterwards does."""
    return _uploads(device)(tensor) if device.type == "cuda" else tensor.to(device)


class Uploads:
    """Copies to one GPU, beside what it computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.pin_memory()
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copy = pinned.to(self._device, non_blocking=True)
        computing.wait_stream(self._stream)
        # Its memory belongs to the copying stream, which must not give it to the next copy while it is read.
        copy.record_stream(computing)
        return copy


_uploads = functools.cache(Uploads)


def pin(tensor: torch.Tensor) -> None:
    """Pins the memory of a tensor where it is, for as long as the process lives: it must not be freed. Memory that is
    allocated pinned would be rounded up to a power of two, half as much again for a large model."""
    if not torch.cuda.is_available() or tensor.nbytes < _PINNED_FROM:
        return
    code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if code:
        _log.warning("CUDA cannot pin %d bytes of host memory (error %d): moves take longer", tensor.nbytes, code)


class Resting:
    """Host memory for tensors that come and go, pinned: made when they first rest, and kept, since pinning takes longer
    than a move."""

    def __init__(self, pin: Callable[[torch.Tensor], None] = pin) -> None:
        self._pin = pin
        self._kept: dict[str, list[torch.Tensor]] = {}

    def rest(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors ``name``, always of the same shapes, in host memory; they are there when this returns."""
        if name not in self._kept:
            self._kept[name] = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
            for host in self._kept[name]:
                self._pin(host)
        for host, tensor in zip(self._kept[name], tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        return list(self._kept[name])

    def moved(self, name: str, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """The tensors on ``device``, be it theirs or the host."""
        if device.type == "cpu":
            return self.rest(name, tensors)
        return [tensor.to(device, non_blocking=True) for tensor in tensors]
