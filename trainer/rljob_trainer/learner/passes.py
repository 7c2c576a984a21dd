"""In which order, and in which thread, a rank's passes through its models run.

A mini-batch is one job per model and micro-batch. Where ranks meet in collectives, or a device has one queue, jobs run
one after the other (``OneByOne``); one rank on CPUs may do better (``cpu/lanes.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import nn

from rljob_trainer.learner.trained import Trained

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PassJob:
    """A forward and backward pass of one model over one micro-batch."""

    trained: Trained
    micro: int
    cost: float
    """About its floating-point operations."""


class Passes(Protocol):
    """What is computed does not depend on which one it is, but for the order in which gradients add up."""

    together: bool
    """Whether all models of an update compute their gradients before any of them steps. Otherwise the first one's
    gradients are gone before the second one's are there."""

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """The results of tasks that share nothing, in their order, when all have ended."""
        ...

    def gradients(
        self, jobs: Sequence[PassJob], one_pass: Callable[[nn.Module, PassJob], T]
    ) -> Mapping[tuple[Trained, int], T]:
        """What ``one_pass`` gives for each job, by model and micro-batch. It adds the gradient of the job to the
        parameters of the module that it is given; all are in the models' own parameters in the end."""
        ...

    def forget(self) -> None:
        """Drops gradients that were not handed over: the update was given up."""
        ...


class OneByOne:
    """One job after the other, in one thread."""

    together = False

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        return [task() for task in tasks]

    def gradients(
        self, jobs: Sequence[PassJob], one_pass: Callable[[nn.Module, PassJob], T]
    ) -> Mapping[tuple[Trained, int], T]:
        return {(job.trained, job.micro): one_pass(job.trained.module, job) for job in jobs}

    def forget(self) -> None:
        """All gradients are the models' own."""
