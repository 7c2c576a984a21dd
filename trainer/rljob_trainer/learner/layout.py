"""How the parameters of a rank's models are spread over ranks: what everything that is kept per parameter asks.

Optimizer, checkpoint, publication and the checks of memory work on a rank's own parts. A backend that cuts parameters
up gives a subclass; where a rank has all it works on and nobody else has the same, ``Layout`` itself will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from rljob_trainer.weights.shards import Shard, gathered, inventory

Named = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class TensorHead:
    """A whole tensor's name and shape."""

    name: str
    shape: tuple[int, ...]


class Layout:
    """Parameters are plain tensors. Calls that are said to be collective are made by all ranks together."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter or of its gradient, sharing its memory."""
        return tensor

    def whole(self, part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """The ranks' parts of something laid out like ``parameter`` put together. Collective."""
        return part

    def computed_with(self, parameter: torch.Tensor) -> torch.Tensor:
        """What a forward pass of this rank has of a parameter: all of it, or what the rank has a part in computing.
        Collective."""
        return parameter.detach()

    def like(self, part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor that is laid out like ``parameter``, and of which ``part`` is this rank's part."""
        return part

    def placed(self, part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor that is laid out like ``parameter``, with ``part`` as this rank's part, and is where ``part`` is, be
        that in host memory or on the rank's device."""
        return part

    def part(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``value``, which every rank has whole and which is to be laid out like ``parameter``."""
        return value

    def shard(self, name: str, parameter: torch.Tensor, part: torch.Tensor) -> Shard:
        """``part``, which is laid out like ``parameter``, under a canonical name."""
        shape = tuple(parameter.shape)
        return Shard(name, shape, (0,) * len(shape), part)

    def release(self, module: nn.Module) -> None:
        """Lets go of what was gathered for a forward pass."""

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds the gradients of other data indices to this rank's, where that has not happened in the backward pass.
        Collective."""

    def squared_norm(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The squared norm of a model's whole gradient, from this rank's parts of it by name: a scalar that is equal on
        all ranks. Collective."""
        return torch.stack(torch._foreach_norm(list(gradients.values()))).square().sum()

    def heads(self, named: Named) -> list[TensorHead]:
        """All tensors of a model, of which ``named`` are those that this rank has a part of. Collective."""
        return [TensorHead(name, tuple(parameter.shape)) for name, parameter in named]

    def gather(self, named: Named, dtype_of: Callable[[str], torch.dtype]) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name, whole tensor)`` one at a time, in the order of ``heads``. All ranks must iterate in step.

        What a rank has whole, and in the dtype that is wanted, is not copied.
        """
        for name, parameter in named:
            yield name, parameter.detach().to(dtype_of(name))


class DividedLayout(Layout):
    """Some tensors, or parts of them, are on other ranks, which say what they have by shards.

    A backend that has a faster way to put its tensors together overrides ``gather``.
    """

    def _shards(self, named: Named) -> list[Shard]:
        return [self.shard(name, parameter, self.local(parameter.detach())) for name, parameter in named]

    def heads(self, named: Named) -> list[TensorHead]:
        parts = inventory(self._shards(named))
        return [TensorHead(name, boxes[0].shape) for name, boxes in parts.items()]

    def gather(self, named: Named, dtype_of: Callable[[str], torch.dtype]) -> Iterator[tuple[str, torch.Tensor]]:
        shards = self._shards(named)
        yield from gathered(shards, inventory(shards), dtype_of)
