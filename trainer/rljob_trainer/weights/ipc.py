"""Weights between two processes that share a device: the sender puts bytes where the receiver can read them.

What stands in for a process group of two. By CUDA IPC on a GPU and by shared memory on a CPU; nothing else differs.
There is one stage, memory of the sender's that both can reach, through which one tensor travels at a time: a copy on
the device each way, and two words over the group's store.
"""

from __future__ import annotations

import json
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rljob_trainer.weights import allocator

BACKEND = "ipc"
"""What a ``WeightLink`` calls it."""


class HandOver:
    """Member 0, who sends, or 1, who receives. Not thread-safe."""

    def __init__(self, store: Any, rank: int, device: torch.device) -> None:
        """``store``: of the two alone. Both are on ``device``, of which each has an index of its own."""
        self._store, self._is_sender, self._device = store, rank == 0, device
        self._begun: deque[_Journey] = deque()
        self._count = 0
        self._stage: Tensor | None = None
        self._handle = ""
        """Of the stage: by which the receiver has reached it, or can."""
        self._given: list[str] = []
        """Handles of the sender's stages that the receiver may have hold of: it lets go of one when it takes from the
        next, and of the last in ``rest``."""

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> _Journey:
        """A broadcast as torch's process groups have it: one contiguous tensor of uint8 ``[n]``, the same n on both
        sides."""
        self._count += 1
        (data,) = tensors
        journey = _Journey(self, self._count, data)
        self._begun.append(journey)
        self.advance()
        return journey

    def advance(self) -> None:
        """Moves on as far as the other side lets it. Raises ``RuntimeError`` when the stage cannot be made or
        reached."""
        while self._begun and (self._send(self._begun[0]) if self._is_sender else self._take(self._begun[0])):
            self._begun.popleft().is_over = True

    def _send(self, journey: _Journey) -> bool:
        if not journey.is_staged:
            stage = self._room(journey.data.numel())
            stage[: journey.data.numel()].copy_(journey.data)
            self._settle()
            self._store.set("full", f"{journey.number}:{self._handle}")
            journey.is_staged = True
        return self._said("empty")[0] == journey.number

    def _take(self, journey: _Journey) -> bool:
        number, handle = self._said("full")
        if number != journey.number:
            return False
        if self._stage is None or handle != self._handle:
            self._stage = None  # the sender's former one
            self._stage, self._handle = reach(handle, self._device), handle
        journey.data.copy_(self._stage[: journey.data.numel()])
        self._settle()
        self._store.set("empty", f"{journey.number}:")
        return True

    def _said(self, what: str) -> tuple[int, str]:
        if not self._store.check([what]):
            return 0, ""
        number, _, handle = self._store.get(what).decode().partition(":")
        return int(number), handle

    def _room(self, nbytes: int) -> Tensor:
        if self._stage is None or self._stage.numel() < nbytes:
            self._stage = None
            self._stage = new_stage(nbytes, self._device)
            self._handle = share(self._stage)
            self._given.append(self._handle)
        return self._stage

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def rest(self) -> None:
        """Gives the stage back, the receiver's first: between two publications the memory is others'."""
        self._stage = None
        self._given.clear()
        if self._is_sender and self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def abort(self) -> None:
        """Ends the group; what is on its way never arrives. The sender's stage is its own again, even if the receiver
        was killed while it had hold of it. One that lives may read what comes there next: it takes no publication for
        whole without the word of its sender."""
        self._begun.clear()
        given, on_gpu = list(self._given), self._device.type == "cuda"
        self.rest()
        for handle in given:
            take_back(handle, on_gpu=on_gpu)
        if given and on_gpu:
            torch.cuda.ipc_collect()


class _Journey:
    """One tensor on its way: what torch calls a work."""

    def __init__(self, group: HandOver, number: int, data: Tensor) -> None:
        self._group, self.number, self.data = group, number, data
        self.is_staged = self.is_over = False

    def is_completed(self) -> bool:
        if not self.is_over:
            self._group.advance()
        return self.is_over

    def wait(self) -> None:
        """Nothing is left to be done for one that is over."""


# ---------------------------------------------------------------------- memory that two processes can reach


def new_stage(nbytes: int, device: torch.device) -> Tensor:
    """Memory ``[nbytes]`` of uint8 that can be shared."""
    settings = allocator.settings()
    if device.type != "cuda" or allocator.EXPANDABLE not in settings:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    # No other process reaches memory of expandable segments: these bytes alone come from elsewhere.
    configure: Any = torch._C._accelerator_setAllocatorSettings
    configure(settings.replace(allocator.EXPANDABLE, "expandable_segments:False"))
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    finally:
        configure(settings)


def share(stage: Tensor) -> str:
    """A handle by which one other process reaches the stage, once."""
    storage: Any = stage.untyped_storage()
    parts = storage._share_cuda_()[1:] if stage.device.type == "cuda" else storage._share_filename_cpu_()
    return json.dumps([{"bytes": part.hex()} if isinstance(part, bytes) else part for part in parts])


def reach(handle: str, device: torch.device) -> Tensor:
    """The stage of another process, on this process's own ``device``."""
    parts = _parts(handle)
    storages: Any = torch.UntypedStorage
    if device.type == "cuda":
        torch.cuda.init()
        storage = storages._new_shared_cuda(device.index or 0, *parts)
    else:
        storage = storages._new_shared_filename_cpu(*parts)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _parts(handle: str) -> list[Any]:
    return [bytes.fromhex(part["bytes"]) if isinstance(part, dict) else part for part in json.loads(handle)]


def take_back(handle: str, *, on_gpu: bool) -> None:
    """What the receiver does when it lets go of the stage, in its place: memory is free when nobody counts as a holder,
    and one that was killed counts for ever. The sender has let go already."""
    parts = _parts(handle)
    if on_gpu:
        # Counts below zero are free as well: of a receiver that lives and lets go, too.
        _, _, _, counters, place, *_ = parts
        storages: Any = torch.UntypedStorage
        storages._release_ipc_counter_cuda(counters, place)
    else:
        with suppress(FileNotFoundError):
            Path("/dev/shm", parts[1].decode().lstrip("/")).unlink()
