"""How models are spread over ranks: FSDP2 per layer, with float32 masters under half-precision compute.

    rank = (copy x shards + shard) x context + part

A copy of the weights is cut over shards x context ranks. To FSDP2 the ranks of a row are like any others: each has
tokens of its own, and their gradients add up.

One rank in float32 stays a plain module: no wrapping, no process group, no cost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rljob_trainer.learner.context import Context
from rljob_trainer.learner.process import meet
from rljob_trainer.learner.settings import LearnerSettings


def needs_process_group(settings: LearnerSettings) -> bool:
    """Half precision is done by FSDP2's mixed precision, on a single rank too."""
    return settings.ranks > 1 or settings.compute_dtype != torch.float32


def join(settings: LearnerSettings, rank: int, address: str, timeout_seconds: float) -> DeviceMesh | None:
    """Joins the learner's process group and returns the mesh; None where one plain rank is all there is."""
    if not needs_process_group(settings):
        return None
    meet(settings, rank, address, timeout_seconds)
    shards = settings.ranks // settings.replicate
    if settings.replicate == 1:
        return init_device_mesh(settings.device, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(settings.device, (settings.replicate, shards), mesh_dim_names=("replicate", "shard"))


def context_of(settings: LearnerSettings) -> Context | None:
    """The neighbours that compute rows together with this rank, after ``join``; None where it computes them alone."""
    if settings.context == 1:
        return None
    sizes = (settings.ranks // settings.context, settings.context)
    own = init_device_mesh(settings.device, sizes, mesh_dim_names=("data", "context"))["context"]
    return Context(own.get_group(), own.size(), own.get_local_rank())


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
