"""What is on the device and what rests in host memory: idle models and optimizer moments can make room there.

On a CPU there is only one place, and nothing ever moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

_HOST = torch.device("cpu")
_ALWAYS_READY = "actor"
"""Rests nowhere else while the device is the learner's: it is read by publication at any time."""


class Residence:
    """Moves the parts of a rank. ``parts`` are functions that move one part to a device, by name.

    Every part has a place where it waits for work. ``working`` brings parts to the device and back to that place;
    ``settle`` and ``evict`` change the places.
    """

    def __init__(
        self, device: torch.device, parts: Mapping[str, Callable[[torch.device], object]], *, idle_in_host: bool
    ) -> None:
        self._device = device
        self._parts = dict(parts)
        self._idle_in_host = idle_in_host
        self._where = dict.fromkeys(parts, device)
        self._rest = dict.fromkeys(parts, device)
        self._shared = False
        """Whether the device is another's at present, who needs what is not in use."""
        self.settle()

    @contextmanager
    def working(self, *names: str) -> Iterator[None]:
        """Has these parts (all, if none is named) on the device, and lets the idle ones rest afterwards."""
        for name in names or self._parts:
            self._move(name, self._device)
        yield
        self._to_rest()

    def settle(self) -> None:
        """The device is the learner's: everything to where it then waits for work."""
        self._shared = False
        for name in self._parts:
            rests = self._idle_in_host and name != _ALWAYS_READY
            self._rest[name] = _HOST if rests else self._device
        self._to_rest()

    def evict(self, *, actor: bool) -> None:
        """Everything to host memory until ``settle``; with ``actor`` False all but the actor's parameters."""
        self._shared = True
        for name in self._parts:
            if actor or name != _ALWAYS_READY:
                self._rest[name] = _HOST
        self._to_rest()

    def _to_rest(self) -> None:
        for name, place in self._rest.items():
            self._move(name, place)
        if self._shared and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _move(self, name: str, device: torch.device) -> None:
        # A part that is not there (a job without critic) has nothing to move.
        if name in self._parts and self._where[name] != device:
            self._parts[name](device)
            self._where[name] = device
