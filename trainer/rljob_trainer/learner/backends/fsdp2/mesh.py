"""How models are spread over ranks: FSDP2 per layer, with float32 masters under half-precision compute.

    rank = ((copy x shards + shard) x context + part) x tensor + place

A copy of the weights is cut over shards x context ranks. To FSDP2 the ranks of a row are like any others: each has
tokens of its own, and their gradients add up. Tensor ranks have other weights: each of their places has a mesh of its
own, over the ranks of that place.

One rank in float32 stays a plain module: no wrapping, no process group, no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rljob_trainer.learner.context import Context
from rljob_trainer.learner.process import meet
from rljob_trainer.learner.settings import LearnerSettings
from rljob_trainer.learner.tensor import TensorRanks


def needs_process_group(settings: LearnerSettings) -> bool:
    """Half precision is done by FSDP2's mixed precision, on a single rank too."""
    return settings.ranks > 1 or settings.compute_dtype != torch.float32


def join(settings: LearnerSettings, rank: int, address: str, timeout_seconds: float) -> DeviceMesh | None:
    """Joins the learner's process group and returns the mesh; None where one plain rank is all there is.

    ``timeout_seconds`` bounds the meeting and every collective of the mesh.
    """
    if not needs_process_group(settings):
        return None
    meet(settings, rank, address, timeout_seconds)
    if settings.replicate == settings.tensor == 1:
        return init_device_mesh(settings.device, (settings.ranks,), mesh_dim_names=("shard",))
    # [replicate, shards, tensor]
    places = torch.arange(settings.ranks).view(settings.replicate, -1, settings.tensor)
    own = places[..., rank % settings.tensor]
    # A mesh that makes its groups itself gives them torch's own deadline.
    timeout = timedelta(seconds=timeout_seconds)
    shards = _own_group(places.transpose(1, 2), timeout)
    if settings.replicate == 1:
        return DeviceMesh.from_group(shards, settings.device, own[0], mesh_dim_names=("shard",))
    groups = [_own_group(places.permute(1, 2, 0), timeout), shards]
    return DeviceMesh.from_group(groups, settings.device, own, mesh_dim_names=("replicate", "shard"))


def context_of(settings: LearnerSettings, timeout_seconds: float) -> Context | None:
    """The ranks that compute rows together with this one, after ``join``; None where it computes them alone."""
    if settings.context == 1:
        return None
    places = torch.arange(settings.ranks).view(-1, settings.context, settings.tensor)
    own = _own_group(places.transpose(1, 2), timedelta(seconds=timeout_seconds))
    return Context(own, own.size(), own.rank())


def tensor_of(settings: LearnerSettings, timeout_seconds: float) -> TensorRanks | None:
    """The neighbours that compute layers together with this rank, after ``join``; None where it has whole ones."""
    if settings.tensor == 1:
        return None
    places = torch.arange(settings.ranks).view(-1, settings.tensor)
    own = _own_group(places, timedelta(seconds=timeout_seconds))
    return TensorRanks(own, own.size(), own.rank())


def _own_group(places: torch.Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Groups of the ranks ``places [..., n]``, of which this rank's is returned. A collective call."""
    own: dist.ProcessGroup = dist.new_subgroups_by_enumeration(places.flatten(0, -2).tolist(), timeout)[0]
    return own


def shard(
    model: nn.Module,
    layers: list[nn.Module],
    mesh: DeviceMesh | None,
    compute_dtype: torch.dtype,
    fill: Callable[[nn.Module], None],
) -> None:
    """Shards a model in place, layer by layer, then what is left (embeddings, norm, head) as one group. ``fill`` is
    called with each before: no rank ever holds a whole model whose parameters get their values only there."""
    if mesh is None:
        return
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype, reduce_dtype=torch.float32
    )
    for module in (*layers, model):
        fill(module)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        # Losses are normalised by global counts: gradients of ranks add up, they are not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def full(parameter: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The whole of one parameter in ``dtype`` on every rank (a collective call); unsharded ones are not copied.

    A shard that rests in host memory takes part from the mesh's device.
    """
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return value if dtype is None else value.to(dtype)
    # Converted before gathering: half the traffic.
    shard = value.to_local().to(value.device_mesh.device_type, dtype or value.dtype)
    whole = DTensor.from_local(
        shard,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return whole.full_tensor()
