"""Adapters (``spec.model.lora``): which linear layers have one, and how many numbers it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rljob_api.memory.shape import ModelShape, TensorShape, numbers
from rljob_api.spec.lora import Lora

_ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes that vLLM's kernels are made for, the least of which that is enough an engine has room for
(rljob_trainer/rollout/vllm_arguments.py)."""


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Two matrices, A ``[rank, in]`` and B ``[out, rank]``, beside linear layers of every layer of a model."""

    rank: int
    targets: tuple[str, ...] = ()
    """As in ``Lora.targets``; empty: all of them."""
    alone: bool = False
    """Whether engines are given the adapter by itself, beside the model that they have read."""

    @classmethod
    def of(cls, lora: Lora) -> AdapterShape:
        return cls(lora.rank, tuple(lora.targets), lora.publish == "adapter")

    def has(self, *names: str) -> bool:
        """Whether one of these linear layers has one."""
        return any(self._chosen(name) for name in names)

    def _chosen(self, name: str) -> bool:
        # A target may be longer than the name, up to that of one single layer, and counts as one in all of them.
        whole = f".{name}"
        return not self.targets or any(whole.endswith(f".{t}") or f".{t}".endswith(whole) for t in self.targets)

    def layers(self, shape: ModelShape) -> Mapping[str, tuple[int, int]]:
        """The linear layers of a model's layer that have one, by name, with the shape ``(out, in)`` of their matrix."""
        return {name: matrix for name, matrix in shape.linear_layers().items() if self._chosen(name)}

    def layer_tensors(self, shape: ModelShape) -> list[TensorShape]:
        """A and B of one layer of a model."""
        size = self.rank
        return [tensor for out, inputs in self.layers(shape).values() for tensor in ((size, inputs), (out, size))]

    def parameters(self, shape: ModelShape) -> int:
        """How many numbers the adapter of a model has."""
        return shape.layers * numbers(self.layer_tensors(shape))

    def in_engine(self, shape: ModelShape) -> int:
        """The numbers that an engine has room for beside a model, all of whose linear layers may have an adapter."""
        size = next((size for size in _ENGINE_RANKS if size >= self.rank), self.rank)
        return shape.layers * numbers(AdapterShape(size).layer_tensors(shape))
