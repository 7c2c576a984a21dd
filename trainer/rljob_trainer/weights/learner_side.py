"""What learner ranks do in a publication: functions for ``RankedLearner.run``, which call them in every rank's process.

Nothing is raised here because of an engine: ranks gather their parameters in step, so each must walk through all of
them whatever becomes of the broadcast, and an engine's failure is not the learner's. It is returned instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from rljob_trainer.errors import DeadlineError, EngineError
from rljob_trainer.weights.group import WeightLink
from rljob_trainer.weights.owners import sums_of_shards
from rljob_trainer.weights.plan import Bucket, TensorMeta, WeightPlan, describe
from rljob_trainer.weights.residence import sums_in_any_order
from rljob_trainer.weights.sender import Publisher, SendReport
from rljob_trainer.weights.shards import Shard

T = TypeVar("T")


class Attached(Protocol):
    """Where objects live beside a rank's models, one of each type."""

    def put(self, thing: object) -> None: ...

    def get(self, kind: type[T]) -> T: ...


class Rank(Protocol):
    """What is needed of a learner rank."""

    rank: int
    device: torch.device

    @property
    def attachments(self) -> Attached: ...

    def call_present(self, version: int) -> None: ...

    def holding(self, version: int) -> AbstractContextManager[None]: ...

    def named_parameters_for_publish(self) -> Iterator[tuple[str, Tensor]]: ...

    def shards(self) -> Iterator[Shard]:
        """The rank's parts of what is published, in its dtype, not gathered."""
        ...

    def lay_out_for_publish(self, packs: Sequence[Bucket]) -> None: ...


@dataclass(slots=True)
class _Side:
    """A rank's part, kept between calls."""

    publisher: Publisher | None
    sends: bool = False
    """Whether anybody receives from it at present."""
    metas: list[TensorMeta] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a group could not be opened or a publication did not succeed."""

    message: str


def open_publisher(rank: Rank, bucket_bytes: int, host: str | None = None, every_rank: bool = False) -> str | None:
    """Prepares publication by rank 0, or by every rank to who shares its device; who sends returns the address of its
    store. ``host``: where it listens, by default this node's address within the Ray cluster."""
    publisher = None
    if rank.rank == 0 or every_rank:
        if host is None:
            import ray

            host = str(ray.util.get_node_ip_address())
        publisher = Publisher(bucket_bytes, host, rank.device)
    rank.attachments.put(_Side(publisher))
    return publisher.address if publisher else None


def connect(rank: Rank, link: WeightLink, timeout: float) -> Failure | None:
    """Opens the weight group on rank 0, or on each rank the one with who shares its device, while all engines join."""
    side = _side(rank)
    own = None if side.publisher is None else link.of_sender(side.publisher.address)
    # By ipc every rank has a publisher, which a broadcast does not need.
    side.sends = own is not None and (rank.rank == 0 or bool(link.senders))
    if side.publisher is not None:
        side.publisher.disconnect()
    if side.publisher is None or own is None or not side.sends:
        return None
    try:
        side.publisher.connect(own, timeout)
    except (DeadlineError, EngineError) as error:
        return Failure(str(error))
    return None


def publish(rank: Rank, version: int, timeout: float, is_new: bool) -> SendReport | Failure | None:
    """Sends the policy's parameters; a rank that sends returns what it cost or why it failed. ``is_new``: the present
    weights become ``version``; otherwise those that are it already are sent.

    Raises ``LearnerError`` on all ranks when they have no weights of that version.
    """
    if is_new:
        rank.call_present(version)
    with rank.holding(version):
        return _publish(rank, version, timeout)


def sums(rank: Rank, in_any_order: bool = False) -> Mapping[str, int]:
    """What the rank's own shards contribute to the sums that an engine must have after a publication: taken from the
    parameters that are trained, by another way than that of the publication. Nothing is gathered."""
    answered_for = (shard for shard in rank.shards() if shard.answers and shard.tensor.numel())
    if in_any_order:
        return sums_in_any_order((shard.name, shard.tensor) for shard in answered_for)
    return sums_of_shards(answered_for)


def _publish(rank: Rank, version: int, timeout: float) -> SendReport | Failure | None:
    side = _side(rank)
    if side.metas is None:
        side.metas = describe(rank.named_parameters_for_publish())
        if side.publisher is not None:
            rank.lay_out_for_publish(WeightPlan(side.metas, side.publisher.bucket_bytes).packs)
    parameters = rank.named_parameters_for_publish()
    result: SendReport | Failure | None = None
    if side.publisher is not None and side.sends:
        try:
            result = side.publisher.publish(side.metas, parameters, version, timeout)
        except (DeadlineError, EngineError) as error:
            result = Failure(str(error))
    for _ in parameters:
        pass
    return result


def _side(rank: Rank) -> _Side:
    return rank.attachments.get(_Side)
