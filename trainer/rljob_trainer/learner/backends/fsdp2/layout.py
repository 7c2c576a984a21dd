"""Parameters that are torch's distributed tensors: a rank's part, the whole, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as DimensionShard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rljob_trainer.errors import LearnerError
from rljob_trainer.learner.backends.fsdp2.mesh import full
from rljob_trainer.learner.layout import Layout, Named
from rljob_trainer.weights.shards import Shard


class Fsdp2Layout(Layout):
    """The layout of modules that went through ``fully_shard``. ``shards`` are the ranks over which one copy is cut."""

    def __init__(self, shards: dist.ProcessGroup) -> None:
        self._shards = shards

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def whole(self, part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        spread = self.like(part, parameter)
        return spread.full_tensor() if isinstance(spread, DTensor) else spread

    def like(self, part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return part
        return DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def part(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return value
        mesh = parameter.device_mesh
        everywhere = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return everywhere.redistribute(mesh, parameter.placements).to_local()

    def shard(self, name: str, parameter: torch.Tensor, part: torch.Tensor) -> Shard:
        if not isinstance(parameter, DTensor):
            return super().shard(name, parameter, part)
        # A strided shard is a kind of ``Shard`` whose parts do not lie together.
        if strange := [place for place in parameter.placements if type(place) not in (DimensionShard, Replicate)]:
            raise LearnerError(f"{name} is distributed in a way whose parts are no boxes: {strange[0]}")
        mesh = parameter.device_mesh
        _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
        coordinate = mesh.get_coordinate() or [0] * mesh.ndim
        copies = [
            at for place, at in zip(parameter.placements, coordinate, strict=True) if isinstance(place, Replicate)
        ]
        return Shard(name, tuple(parameter.shape), tuple(offset), part, answers=not any(copies))

    def release(self, module: nn.Module) -> None:
        # FSDP2 keeps the outermost group's for a backward pass, which a score has not got, and would use it again when
        # the weights are others.
        for inner in module.modules():
            if isinstance(inner, FSDPModule):
                inner.reshard()

    def squared_norm(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        total = super().squared_norm(gradients)
        dist.all_reduce(total, group=self._shards)
        return total

    def gather(self, named: Named, dtype_of: Callable[[str], torch.dtype]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in named:
            yield name, full(parameter, dtype_of(name))
