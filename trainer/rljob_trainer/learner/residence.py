"""What is on the device and what rests in host memory: idle models and optimizer moments can make room there.

On a CPU there is only one place, and nothing ever moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

_HOST = torch.device("cpu")
_ALWAYS_READY = "actor"
"""Never rests: it is read by publication at any time."""


class Residence:
    """Moves the parts of a rank. ``parts`` are functions that move one part to a device, by name."""

    def __init__(
        self, device: torch.device, parts: Mapping[str, Callable[[torch.device], object]], *, idle_in_host: bool
    ) -> None:
        self._device = device
        self._parts = dict(parts)
        self._idle_in_host = idle_in_host
        self._where = dict.fromkeys(parts, device)
        self.settle()

    @contextmanager
    def working(self, *names: str) -> Iterator[None]:
        """Has these parts (all, if none is named) on the device, and lets the idle ones rest afterwards."""
        for name in names or self._parts:
            self._move(name, self._device)
        yield
        self.settle()

    def settle(self) -> None:
        """Everything to where it waits for work."""
        for name in self._parts:
            rests = self._idle_in_host and name != _ALWAYS_READY
            self._move(name, _HOST if rests else self._device)

    def evict(self, *, actor: bool) -> None:
        """Everything to host memory; with ``actor`` False all but the actor's parameters."""
        for name in self._parts:
            if actor or name != _ALWAYS_READY:
                self._move(name, _HOST)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _move(self, name: str, device: torch.device) -> None:
        # A part that is not there (a job without critic) has nothing to move.
        if name in self._parts and self._where[name] != device:
            self._parts[name](device)
            self._where[name] = device
