"""Two lanes through one mini-batch: which thread runs which micro-batches of which models, and where gradients add up.

The work of a mini-batch is one job per model and micro-batch. ``assign`` spreads the jobs over two lanes by their cost.
A model that runs in both has a ``Twin`` in the second: the same parameters with gradients of their own, so that the two
sums do not depend on which thread came first. They are added when both lanes are through. The lanes are the same on a
machine with one core, where a single thread runs one after the other, so the result is the same to the last bit.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from rljob_trainer.learner.cpu.side_by_side import SideBySide
from rljob_trainer.learner.passes import PassJob
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.trained import Trained

T = TypeVar("T")

_HALVED_FROM = 1024
_HALVED_FROM_WITH_CRITIC = 8192
"""Row tokens, measured with two layers of 64 columns on two cores: two threads that share Python's lock lose 8 % with
480, and win 16 % with 960, 25 % with 1,900, 60 % with 3,800."""


def two_lanes(settings: LearnerSettings) -> bool:
    """Whether an update is spread over two threads: one rank on CPUs, in no process group. Compiled layers are one
    model's own, and have no twin."""
    return (
        settings.lanes == 2
        and settings.device == "cpu"
        and settings.ranks == 1
        and not settings.compile
        and settings.compute_dtype == torch.float32
    )


def halved_from(settings: LearnerSettings) -> int | None:
    """Row tokens from which a mini-batch is cut in two micro-batches at least, for two lanes; None: never.

    A forward and backward pass has a fixed cost (6 ms for two layers). Actor and critic fill two lanes without another
    one, as far as they cost the same: only what is large is cut for a better balance.
    """
    if not two_lanes(settings):
        return None
    return _HALVED_FROM if settings.critic is None else _HALVED_FROM_WITH_CRITIC


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


class TwoLanes:
    """``Passes`` in two lanes."""

    together = True

    def __init__(self) -> None:
        self._cores = SideBySide(allowed=True)
        self._twins: dict[str, Twin] = {}

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        return self._cores.run(tasks)

    def gradients(
        self, jobs: Sequence[PassJob], one_pass: Callable[[nn.Module, PassJob], T]
    ) -> Mapping[tuple[Trained, int], T]:
        lanes = [[jobs[job] for job in lane] for lane in assign([job.cost for job in jobs], 2)]
        # A model that runs in both lanes has a twin in the second.
        in_both = dict.fromkeys(job.trained for job in lanes[1] if job.trained in {job.trained for job in lanes[0]})
        twins = {trained: self._twin(trained) for trained in in_both}

        def run(lane: int) -> dict[tuple[Trained, int], T]:
            told = {}
            for job in lanes[lane]:
                module = twins[job.trained].module if lane and job.trained in twins else job.trained.module
                told[job.trained, job.micro] = one_pass(module, job)
            return told

        for twin in twins.values():
            twin.follow()
        told = self._cores.run([partial(run, lane) for lane in range(len(lanes))])
        for twin in twins.values():
            twin.hand_over()
        return told[0] | told[1]

    def forget(self) -> None:
        for twin in self._twins.values():
            twin.module.zero_grad()

    def _twin(self, trained: Trained) -> Twin:
        if trained.name not in self._twins:
            self._twins[trained.name] = Twin(trained.module)
        return self._twins[trained.name]
