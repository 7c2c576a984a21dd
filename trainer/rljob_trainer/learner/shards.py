"""A parameter, a rank's own part of it, and back."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A rank's own part of a parameter or gradient, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(shard: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``shard`` as a distributed tensor laid out like ``parameter``, sharing memory; itself if that is not
    distributed."""
    if not isinstance(parameter, DTensor):
        return shard
    if shard.device.type != parameter.device_mesh.device_type:
        # Rests in host memory: ``from_local`` would make a copy of it on the mesh's device.
        return DTensor(shard, parameter._spec, requires_grad=False)
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def whole(shard: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """All ranks' shards of something laid out like ``parameter`` put together (a collective call)."""
    placed = like(shard, parameter)
    return placed.full_tensor() if isinstance(placed, DTensor) else placed


def part(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A rank's own part of ``value``, which every rank has whole and which is to be laid out like ``parameter``."""
    if not isinstance(parameter, DTensor):
        return value
    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, parameter.placements).to_local()
