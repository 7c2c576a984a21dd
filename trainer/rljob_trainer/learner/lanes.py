"""Two lanes through one mini-batch: which thread runs which micro-batches of which models, and where gradients add up.

The work of a mini-batch is one job per model and micro-batch. ``assign`` spreads the jobs over two lanes by their cost.
A model that runs in both has a ``Twin`` in the second: the same parameters with gradients of their own, so that the two
sums do not depend on which thread came first. They are added when both lanes are through. The lanes are the same on a
machine with one core, where a single thread runs one after the other, so the result is the same to the last bit.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Sequence

from torch import nn


def assign(costs: Sequence[float], lanes: int) -> list[list[int]]:
    """The jobs of each lane, ascending: the costliest first, each to the lane with the least so far (LPT)."""
    loads = [(0.0, lane) for lane in range(lanes)]
    result: list[list[int]] = [[] for _ in range(lanes)]
    for job in sorted(range(len(costs)), key=lambda j: (-costs[j], j)):
        load, lane = heapq.heappop(loads)
        result[lane].append(job)
        heapq.heappush(loads, (load + costs[job], lane))
    return [sorted(jobs) for jobs in result]


class Twin:
    """A second module over the same parameters, with gradients of its own. Costs memory for these alone."""

    def __init__(self, module: nn.Module) -> None:
        self._original = module
        shared: dict[int, object] = {id(buffer): buffer for buffer in module.buffers()}
        shared |= {
            id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad)  # the same memory
            for p in module.parameters()
        }
        self.module: nn.Module = copy.deepcopy(module, shared)

    def follow(self) -> None:
        """To be called before each use: the original's parameters may lie elsewhere than before."""
        for own, theirs in zip(self.module.parameters(), self._original.parameters(), strict=True):
            own.data = theirs.data

    def hand_over(self) -> None:
        """Adds the twin's gradients to the original's."""
        for own, theirs in zip(self.module.parameters(), self._original.parameters(), strict=True):
            if own.grad is not None:
                theirs.grad = own.grad if theirs.grad is None else theirs.grad.add_(own.grad)
                own.grad = None
