"""A rank's part of a tensor, said so that anybody can put the whole together, and whoever does so.

Learners cut their tensors up in many ways. What they all can say of a part is its canonical name, the shape of the
whole, and where in it the part begins. A checkpoint is written and read by that (``learner/state.py``), and a
publication gathers by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rljob_trainer.errors import LearnerError


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of one tensor. Several ranks may hold the same box; together they hold all of it."""

    name: str
    """Canonical: the same whatever the backend and the number of ranks."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Where in the whole the box begins, ``[len(shape)]``."""
    tensor: torch.Tensor
    """The box itself, sharing the memory of what is trained. Empty where this rank has no part of the tensor."""
    answers: bool = True
    """Whether this rank is the one that counts where several have the box alike."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A shard without its numbers: what ranks tell each other."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    rank: int


def inventory(shards: Sequence[Shard]) -> dict[str, list[TensorPart]]:
    """Who holds which parts of which tensors, each part once (its lowest rank): the same on every rank, in the order of
    the ranks' own shards. A collective call of all ranks of the default process group.

    Raises ``LearnerError`` on all of them for a tensor of which the parts are not the whole: what nobody holds would be
    whatever was in memory.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = [(s.name, TensorPart(s.shape, s.offset, tuple(s.tensor.shape), rank)) for s in shards if s.tensor.numel()]
    everyones = [mine]
    if dist.is_initialized():
        told: list[list[tuple[str, TensorPart]] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        everyones = [parts for parts in told if parts is not None]
    found: dict[str, list[TensorPart]] = {}
    for parts in everyones:
        for name, part in parts:
            held = found.setdefault(name, [])
            if all(other.offset != part.offset for other in held):
                held.append(part)
    for name, held in found.items():
        shapes, numbers = {part.shape for part in held}, sum(math.prod(part.size) for part in held)
        if len(shapes) > 1 or numbers != math.prod(held[0].shape):
            raise LearnerError(
                f"the ranks' parts of {name} have {numbers} elements, but a tensor of shape "
                f"{' and '.join(map(str, sorted(shapes)))} has {math.prod(held[0].shape)}: the shards of the backend "
                "(spec.trainer.backend) have gaps or overlaps"
            )
    return found


def gathered(
    shards: Sequence[Shard], parts: dict[str, list[TensorPart]], dtype_of: Callable[[str], torch.dtype]
) -> Iterator[tuple[str, torch.Tensor]]:
    """``(name, whole tensor)`` in ``dtype_of(name)`` on every rank, one at a time, in the order of the ``inventory``.

    A collective call: all ranks must iterate in step. Parts are converted before they travel. A tensor that its owner
    holds whole, in that dtype, is not copied there.
    """
    own = {(shard.name, shard.offset): shard.tensor for shard in shards}
    device = next((shard.tensor.device for shard in shards), torch.device("cpu"))
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, boxes in parts.items():
        dtype = dtype_of(name)
        whole: torch.Tensor | None = None
        for box in boxes:
            if box.rank == rank:
                piece = own[name, box.offset].detach().to(dtype).contiguous()
            else:
                piece = torch.empty(box.size, dtype=dtype, device=device)
            if dist.is_initialized():
                dist.broadcast(piece, src=box.rank)
            if box.size == box.shape:
                whole = piece
            else:
                whole = torch.empty(box.shape, dtype=dtype, device=device) if whole is None else whole
                place = tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))
                whole[place] = piece
        assert whole is not None
        yield name, whole
