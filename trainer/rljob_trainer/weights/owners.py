"""Which part of a distributed tensor a rank answers for, and what that part contributes to the tensor's sum.

Of what several ranks have alike, the first one answers: so the ranks' sums add up to the sum of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rljob_trainer.errors import LearnerError
from rljob_trainer.weights.sums import sum_of_box, sums_of, unsigned


def owned(tensor: Tensor, rank: int) -> Tensor | None:
    """The elements that ``rank`` answers for; None: others do. A tensor that is not distributed is the first rank's."""
    if not isinstance(tensor, DTensor):
        return tensor if rank == 0 else None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    for place, at in zip(tensor.placements, coordinate, strict=True):
        if isinstance(place, Replicate) and at > 0:
            return None
    return tensor.to_local()


def sums_of_owned(named: Iterable[tuple[str, Tensor]], rank: int) -> dict[str, int]:
    """What ``rank`` contributes, below 2^64, by name. Raises ``LearnerError`` for a tensor that is neither cut along
    its dimensions nor whole."""
    names: list[str] = []
    sums: list[Tensor] = []
    for name, tensor in named:
        part = owned(tensor, rank)
        if part is None:
            continue
        names.append(name)
        sums.append(sums_of([part])[0] if part is tensor else _sum_of_shard(name, tensor, part))
    numbers = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
    return dict(zip(names, map(unsigned, numbers), strict=True))


def _sum_of_shard(name: str, tensor: Tensor, part: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    # A strided shard is a kind of ``Shard`` whose parts do not lie together.
    if strange := [place for place in tensor.placements if type(place) not in (Shard, Replicate)]:
        raise LearnerError(f"{name} is distributed in a way whose parts cannot be added up: {strange[0]}")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(shape) == tuple(part.shape), name
    return sum_of_box(part, tensor.shape, offset)
