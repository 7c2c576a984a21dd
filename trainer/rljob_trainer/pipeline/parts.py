"""What the loop needs from the rest of the trainer, as protocols: it knows no Ray, no torch, no clock of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rljob_trainer.episodes.episode import Group, Prompt


class Feed(Protocol):
    """Where prompts come from, in a seeded order that can be resumed."""

    async def prepare(self, prompts: int) -> bool:
        """Has so many prompts at hand for ``next``, fewer where the data ends.

        Returns whether they were at hand already; if not, time has passed, in which others may have taken some. Raises
        what is wrong with the data.
        """
        ...

    def next(self) -> Prompt | None:
        """The next prompt, or None when the last epoch is over. Waits for nothing that was prepared."""
        ...

    def state_dict(self) -> dict[str, object]: ...


class Rollout(Protocol):
    """Turns a prompt into a scored group: generation and reward."""

    @property
    def serving_version(self) -> int:
        """The policy version that a request admitted now would start under."""
        ...

    @property
    def finished_at(self) -> float:
        """When the last sample was finished, in the time of the running event loop."""
        ...

    async def run(self, prompt: Prompt) -> Group: ...

    async def end(self, ordinals: Sequence[int]) -> list[int]:
        """These groups are to be trained now: what they are made of ends with what it has, and ``run`` returns soon.
        Returns those of which nothing can be made yet."""
        ...

    def waiting_for(self, finished: int, wanted: int) -> str:
        """What a batch of ``wanted`` groups, of which so many are ``finished``, lacks: how many samples, which is the
        oldest, and where it runs."""
        ...


class Journal(Protocol):
    """Is told what becomes of every prompt. Called on the loop: must not wait for anything."""

    def admitted(self, prompt: Prompt, version: int, deadline: int) -> None:
        """Handed to an engine that serves ``version``; to be trained in version ``deadline`` at the latest."""
        ...

    def finished(self, ordinal: int) -> None: ...

    def dropped(self, group: Group, reason: str) -> None: ...

    def trained(self, groups: Sequence[Group], step: int, version: int) -> None: ...


class NoJournal:
    """The journal of a loop whose prompts nobody follows."""

    def admitted(self, prompt: Prompt, version: int, deadline: int) -> None:
        return

    def finished(self, ordinal: int) -> None:
        return

    def dropped(self, group: Group, reason: str) -> None:
        return

    def trained(self, groups: Sequence[Group], step: int, version: int) -> None:
        return


@dataclass(frozen=True, slots=True)
class Apart:
    """How far trainer and engines are apart on the tokens of a batch."""

    family: Literal["mismatch", "drift"]
    """``mismatch``: all tokens are of the trainer's present weights, so that any difference is an error. ``drift``:
    what the policy has learned since is in the figures too."""
    kl: float
    chi_square: float
    effective_sample_size: float
    worst: str = ""
    """The samples that are furthest apart, in words; empty: nobody asked for them."""


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """What training on a batch came to. Whatever decides reads its own field; the metrics are for people."""

    metrics: dict[str, float] = field(default_factory=dict)
    apart: Apart | None = None
    """None: nothing was scored that could be compared."""


class Trainer(Protocol):
    """Trains on a batch of groups and publishes weights."""

    async def train(self, groups: Sequence[Group], *, step: int, version: int) -> TrainedBatch: ...

    async def publish(self, version: int) -> dict[str, float]: ...


@dataclass(slots=True)
class StepRecord:
    """What one step (one policy version) did."""

    step: int
    version: int
    groups: list[Group]
    metrics: dict[str, float] = field(default_factory=dict)
    apart: Apart | None = None
    """Of all batches of the step."""
