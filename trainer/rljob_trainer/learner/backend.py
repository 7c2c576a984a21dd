"""A backend: one way to spread models over ranks, chosen by ``trainer.backend``.

Who calls what, in which order (``docs/architecture.md``, "Backends", tells it as a story):

    driver      backend_of(name)                      the class, found by its name
    group.py    backend.placement(settings)           one ``Placement`` a rank
    group.py    backend.rules(settings)               what the backend asks of rows
    rank        backend.start(settings, rank, ...)    in every rank's process at once: process group, models, optimizer
    group.py    cut(batch, ..., placement, rules)     one share for each data index, sent to the ranks that need it
    rank        score / update / save / load ...      ``BackendRank``, on all ranks at once
    group.py    ...                                   outputs are taken from the ranks that return them

Most backends need not write a ``BackendRank``: ``LearnerRank`` (``rank.py``) is one over modules of any layout. They
hand it ``SpreadModels``: a policy (critic, reference) that is cut up already, and a ``Layout`` that says how.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rljob_trainer.learner.giving_up import GivingUp
    from rljob_trainer.learner.protocol import LearnerFacts, LossSettings, ScoreRequest, UpdateRequest
    from rljob_trainer.learner.settings import LearnerSettings
    from rljob_trainer.learner.work import RankReport, RankScores, Share
    from rljob_trainer.weights.plan import Bucket
    from rljob_trainer.weights.shards import Shard

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placement:
    """What one rank is in the division of work."""

    data_index: int
    """Ranks of one index work on the same sequences (the stages of a pipeline, the parts of a tensor); ranks of
    different indices on different ones. Indices are 0, 1, ... without a gap."""
    needs_inputs: bool = True
    """Whether the rank is sent the sequences. One that is not is told only how many micro-batches there are: it gets
    what it needs from its neighbours."""
    returns_outputs: bool = True
    """Whether streams and sums of metrics are taken from this rank: of exactly one rank of each data index."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """What a backend asks of the rows that sequences are packed into.

    One rule is always there and has no field: all data indices have equal numbers of micro-batches in a mini-batch, or
    collectives within the models would not meet. Where there are too few sequences for that, empty micro-batches that
    count nothing fill up.
    """

    token_limit: int
    """Row tokens of a micro-batch; only a sequence that is longer by itself has more."""
    share_prefixes: bool = True
    """Whether what several sequences begin with may stand in a row once for all of them."""
    count_multiple: int = 1
    """What the number of micro-batches of a mini-batch is a multiple of (the stages of some pipeline schedules)."""
    length_multiple: int = 1
    """What the number of tokens of a row is a multiple of (ranks that each have a part of it); tokens that nobody reads
    fill it up."""
    halved_from: int | None = None
    """Row tokens of a mini-batch from which it becomes two micro-batches at least; None: never."""


class Attachments:
    """Objects of others that live beside a rank's models, one of each type: the sender of a publication, an engine."""

    def __init__(self) -> None:
        self._kept: dict[type[object], object] = {}

    def put(self, thing: object) -> None:
        """Keeps ``thing`` in place of the one of its type that was there."""
        self._kept[type(thing)] = thing

    def get(self, kind: type[T]) -> T:
        """The one of that type. Raises ``KeyError`` when there is none."""
        kept = self._kept[kind]
        assert isinstance(kept, kind)
        return kept


class BackendRank(Protocol):
    """One rank's models in its process. Every method is called on all ranks at once, but for ``giving_up``'s.

    All ranks share torch's default process group, which can reduce numbers in host memory.
    """

    settings: LearnerSettings
    rank: int
    device: torch.device
    giving_up: GivingUp
    """Hears of a step that is to be given up, from another thread."""
    attachments: Attachments
    live_model: PreTrainedModel | None
    """The actor, for an engine in the same process that samples from the very weights that are trained; None where no
    rank has them whole."""

    def facts(self) -> LearnerFacts:
        """The actor's size as published, and the device."""
        ...

    def score(self, share: Share, request: ScoreRequest) -> RankScores:
        """The streams asked for, in the order of the share's micro-batches. Raises ``StepGivenUpError``."""
        ...

    def update(self, share: Share, loss: LossSettings, request: UpdateRequest) -> RankReport:
        """One optimizer step of each model per mini-batch. Raises ``StepGivenUpError`` before the first of them."""
        ...

    def save(self, place: str | Path, belongs_to: str = "") -> None:
        """Writes this rank's part of the state. Raises ``CheckpointError``."""
        ...

    def load(self, place: str | Path, belongs_to: str = "") -> None:
        """Reads a state by canonical names, whichever backend and number of ranks wrote it. Raises ``CheckpointError``
        saying what cannot be read."""
        ...

    def load_weights(self, place: str | Path) -> None:
        """Reads the actor's parameters of a state and nothing else. Raises ``CheckpointError``."""
        ...

    def export(self, folder: Path) -> None:
        """Writes the actor as a Hugging Face folder."""
        ...

    def export_adapter(self, folder: Path, base: str) -> None:
        """Writes the actor's adapter (``settings.lora``) as peft reads it; ``base`` is the name of its model."""
        ...

    def shards(self) -> Iterator[Shard]:
        """This rank's parts of what is published, by Hugging Face names and in the compute dtype, one at a time; not
        gathered. All ranks iterate in step."""
        ...

    def call_present(self, version: int) -> None:
        """The actor's weights are policy version ``version`` from now on. Raises ``LearnerError``."""
        ...

    def holding(self, version: int) -> AbstractContextManager[None]:
        """Inside, the actor has the weights of ``version``. Raises ``LearnerError`` when the rank has none of it."""
        ...

    def named_parameters_for_publish(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``(Hugging Face name, whole tensor)`` in the compute dtype; all ranks iterate in step."""
        ...

    def lay_out_for_publish(self, packs: Sequence[Bucket]) -> None:
        """May move parameters together as the packs want them."""
        ...

    def rest(self, *, actor: bool = True) -> None:
        """Frees the device for an engine until ``wake``; with ``actor`` False the actor's parameters stay."""
        ...

    def wake(self) -> None:
        """Takes the device back."""
        ...

    def close(self) -> None:
        """Leaves the process group."""
        ...


class Backend(Protocol):
    """What ``trainer.backend`` names: a class whose objects need no arguments. The driver makes one too, and asks it
    for ``placement`` and ``rules``: importing it must not import a model library."""

    def placement(self, settings: LearnerSettings) -> tuple[Placement, ...]:
        """``[settings.ranks]``. Raises ``JobFileError`` for a job that this backend cannot do, naming the field."""
        ...

    def rules(self, settings: LearnerSettings) -> RowRules: ...

    def has_live_model(self, settings: LearnerSettings) -> bool:
        """Whether ranks will have a ``live_model``."""
        ...

    def start(self, settings: LearnerSettings, rank: int, address: str, timeout_seconds: float) -> BackendRank:
        """Builds one rank, in its process, all ranks at once. ``address`` (host:port) is where they meet;
        ``timeout_seconds`` bounds the meeting and every later collective."""
        ...
