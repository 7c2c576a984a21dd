"""Parameters that are torch's distributed tensors: a rank's part, the whole, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as DimensionShard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rljob_trainer.errors import LearnerError
from rljob_trainer.learner.backends.fsdp2.mesh import full
from rljob_trainer.learner.backends.fsdp2.tensor import DividedDimension, by_parameter, has_part_of_gradient
from rljob_trainer.learner.layout import Layout, Named, TensorHead
from rljob_trainer.learner.tensor import TensorRanks
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

    def computed_with(self, parameter: torch.Tensor) -> torch.Tensor:
        return full(parameter)

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

    def placed(self, part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        # ``from_local`` would take it to the mesh's device.
        return DTensor(part, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else part

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
            raise LearnerError(f"{name} is distributed in parts that are not boxes: {strange[0]}")
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


class DividedFsdp2Layout(Fsdp2Layout):
    """An ``Fsdp2Layout`` of modules whose matrices were divided among tensor ranks before (``tensor.py``).

    A parameter is then a part of the whole, and FSDP2's shards are shards of that part.
    """

    def __init__(
        self,
        shards: dist.ProcessGroup,
        tensor: TensorRanks,
        modules: Sequence[nn.Module],
        dimensions: Mapping[str, DividedDimension],
    ) -> None:
        """``modules``: all whose parameters there are. ``dimensions``: of those that are divided, by their names in
        the modules."""
        super().__init__(shards)
        self._tensor = tensor
        self._names = frozenset(dimensions)
        self._divided = by_parameter(modules, dimensions)
        self._summands = {
            parameter
            for module in modules
            for name, parameter in module.named_parameters()
            if has_part_of_gradient(name)
        }

    def whole(self, part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return self._joined(super().whole(part, parameter), parameter)

    def part(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if (divided := self._divided.get(parameter)) is not None:
            own = self._tensor.part(divided.length)
            value = value.narrow(divided.dimension, own.start, own.stop - own.start).contiguous()
        return super().part(value, parameter)

    def shard(self, name: str, parameter: torch.Tensor, part: torch.Tensor) -> Shard:
        shard = super().shard(name, parameter, part)
        divided = self._divided.get(parameter)
        if divided is None:
            return replace(shard, answers=shard.answers and not self._tensor.index)
        offset = list(shard.offset)
        offset[divided.dimension] += self._tensor.part(divided.length).start
        return replace(shard, shape=_whole_shape(parameter, divided), offset=tuple(offset))

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients of what all tensor ranks have. They are equal, or parts of one sum; in either case each rank has
        the same bits from here on, or the ranks would drift apart."""
        summed: list[torch.Tensor] = []
        equal: list[torch.Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None and parameter not in self._divided:
                (summed if parameter in self._summands else equal).append(self.local(parameter.grad))
        group = self._tensor.group
        for gradients in (summed, equal):
            sizes = [gradient.numel() for gradient in gradients]
            if not sum(sizes):  # a rank's shard of what is small may be nothing; so it is for its neighbours
                continue
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            if gradients is summed:
                dist.all_reduce(flat, group=group)
            else:
                dist.broadcast(flat, group_src=0, group=group)
            for gradient, value in zip(gradients, flat.split(sizes), strict=True):
                gradient.copy_(value.view_as(gradient))

    def squared_norm(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What all tensor ranks have counts once."""
        counted = {
            name: gradient for name, gradient in gradients.items() if name in self._names or not self._tensor.index
        }
        total = super().squared_norm(counted)
        dist.all_reduce(total, group=self._tensor.group)
        return total

    def heads(self, named: Named) -> list[TensorHead]:
        return [
            TensorHead(name, tuple(p.shape) if (d := self._divided.get(p)) is None else _whole_shape(p, d))
            for name, p in named
        ]

    def gather(self, named: Named, dtype_of: Callable[[str], torch.dtype]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in named:
            yield name, self._joined(full(parameter, dtype_of(name)), parameter)

    def _joined(self, part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor rank's part, and those of the others, of what is laid out like ``parameter``."""
        divided = self._divided.get(parameter)
        return part if divided is None else self._tensor.joined(part, divided.dimension, divided.length)


def _whole_shape(parameter: torch.Tensor, divided: DividedDimension) -> tuple[int, ...]:
    shape = list(parameter.shape)
    shape[divided.dimension] = divided.length
    return tuple(shape)
