"""What the loop needs from the rest of the trainer, as protocols: it knows no Ray, no torch, no clock of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rljob_trainer.samples import Group, Prompt


class Feed(Protocol):
    """Where prompts come from, in a seeded order that can be resumed."""

    def next(self) -> Prompt | None:
        """The next prompt, or None when the last epoch is over."""
        ...

    def state_dict(self) -> dict[str, object]: ...


class Rollout(Protocol):
    """Turns a prompt into a scored group: generation and reward."""

    @property
    def serving_version(self) -> int:
        """The policy version that a request admitted now would start under."""
        ...

    async def run(self, prompt: Prompt) -> Group: ...

    def waiting_for(self) -> str:
        """One sentence: what is running, the oldest, and where."""
        ...


class Trainer(Protocol):
    """Trains on a batch of groups and publishes weights."""

    async def train(self, groups: Sequence[Group], *, step: int, version: int) -> dict[str, float]: ...

    async def publish(self, version: int) -> dict[str, float]: ...


@dataclass(slots=True)
class StepRecord:
    """What one step (one policy version) did."""

    step: int
    version: int
    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)
