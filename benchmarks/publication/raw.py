"""The raw broadcast: gloo between two processes, all bytes in one buffer, one call, nothing else."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

dist: Any = distributed
"""Stores and process groups are missing from its type annotations."""


class RawGroup:
    """Two processes and gloo between them. It is no default group: vLLM has one of its own in its process."""

    def __init__(self, rank: int, port: int = 0) -> None:
        """Rank 0 listens on a port of the system's choice (``self.port``); rank 1 connects to it."""
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        self.port: int = store.port
        self._store, self._rank, self._group = store, rank, None

    def open(self) -> None:
        """Returns when both are there."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(minutes=10)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group = dist.ProcessGroupGloo(self._store, self._rank, 2, options)

    def broadcast(self, buffer: Tensor) -> float:
        """Sends (rank 0) or receives ``buffer``; seconds until both are done."""
        group: Any = self._group
        group.barrier().wait()
        started = time.perf_counter()
        group.broadcast([buffer], dist.BroadcastOptions()).wait()
        group.barrier().wait()
        return time.perf_counter() - started


def empty(nbytes: int) -> Tensor:
    """A buffer whose pages exist already: the transfer should not pay for making them."""
    return torch.zeros(nbytes, dtype=torch.uint8)
