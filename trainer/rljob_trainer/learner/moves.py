"""From host memory to a GPU and back, without the host waiting for what the GPU has to do first.

A copy from ordinary memory goes through the driver's own, and whoever asked for it waits until the GPU has come to it:
after all it was told before. What is pinned the GPU takes by itself. So while it computes a micro-batch the host lays
out the next one and sends it, on a stream of its own, and has time left.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rljob_trainer.learner.layout import Layout

_PIECE = 256 << 20
"""Bytes of a piece of resting memory, but for a tensor that is larger, and the last."""
_ALIGNED = 256
"""Bytes: where in a piece a tensor may begin."""

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


def _pinned(nbytes: int) -> torch.Tensor:
    """Bytes from torch's own allocator, which keeps what has been pinned for whoever asks next and takes it back no
    sooner than the copies from it have been made."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class Resting:
    """Host memory for tensors that come and go, pinned where they come from a GPU: made when they first rest, and kept,
    since pinning takes longer than a move."""

    def __init__(self, pinned: Callable[[int], torch.Tensor] = _pinned) -> None:
        self._pinned = pinned
        self._refused = False
        self._kept: dict[str, list[torch.Tensor]] = {}

    def rest(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors ``name``, always of the same shapes, in host memory; they are there when this returns."""
        if name not in self._kept:
            self._kept[name] = self._places(tensors)
        for host, tensor in zip(self._kept[name], tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        return list(self._kept[name])

    def _places(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One for each tensor, laid out in pieces of memory. torch rounds what it pins up to a power of two: pieces are
        of such sizes, large tensors get one and small ones what is left in them."""
        pin = torch.cuda.is_available() and any(tensor.is_cuda for tensor in tensors)
        pieces: list[_Piece] = []
        lies: dict[int, tuple[_Piece, int]] = {}
        for index in sorted(range(len(tensors)), key=lambda index: -tensors[index].nbytes):
            size = -(-tensors[index].nbytes // _ALIGNED) * _ALIGNED
            piece = next((piece for piece in pieces if piece.used + size <= piece.room), None)
            if piece is None:
                pieces.append(piece := _Piece(max(_PIECE, _power(size))))
            lies[index] = (piece, piece.used)
            piece.used += size
        memory = {id(piece): self._memory(_power(piece.used) if pin else piece.used, pin) for piece in pieces}
        places = []
        for index, tensor in enumerate(tensors):
            piece, start = lies[index]
            place = memory[id(piece)][start : start + tensor.nbytes]
            places.append(place.view(tensor.dtype).view(tensor.shape))
        return places

    def _memory(self, nbytes: int, pin: bool) -> torch.Tensor:
        if pin and not self._refused:
            try:
                return self._pinned(nbytes)
            except RuntimeError as error:
                self._refused = True
                _log.warning("CUDA cannot pin %d bytes of host memory: copies are slower (%s)", nbytes, error)
        return torch.empty(nbytes, dtype=torch.uint8)

    def moved(self, name: str, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """The tensors on ``device``, be it theirs or the host."""
        if device.type == "cpu":
            return self.rest(name, tensors)
        return [tensor.to(device, non_blocking=True) for tensor in tensors]


class ModuleMoves:
    """Takes a module to host memory and back, its parameters staying the objects that they are. It rests where its
    optimizer's state would (``Resting``)."""

    def __init__(self, module: nn.Module, layout: Layout, resting: Resting | None = None) -> None:
        """``layout``: how its parameters are spread."""
        self._module, self._layout = module, layout
        self._resting = resting or Resting()

    @torch.no_grad()
    def __call__(self, device: torch.device) -> None:
        """All parameters and buffers to ``device``. What was gathered for a pass goes."""
        self._layout.release(self._module)
        # A matrix that stands in two places is one tensor.
        tensors = [*self._module.parameters(), *self._module.buffers()]
        parts = [self._layout.local(tensor.detach()) for tensor in tensors]
        moved = self._resting.moved("module", parts, device)
        there = {id(tensor): self._layout.placed(part, tensor) for tensor, part in zip(tensors, moved, strict=True)}
        self._module._apply(lambda tensor: there[id(tensor)] if id(tensor) in there else tensor.to(device))


@dataclass
class _Piece:
    """A piece of host memory, in bytes."""

    room: int
    used: int = 0


def _power(nbytes: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(nbytes - 1, 0).bit_length()
