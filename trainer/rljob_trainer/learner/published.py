"""The names and shapes under which a model's files have its parameters, and engines are sent them.

Most parameters are in files as they are in memory. The experts of a layer are not: transformers keeps them in two
stacks, which its grouped products want, and files have each matrix by itself:

    ...mlp.experts.gate_up_proj [E, 2 I, d]    ...mlp.experts.<e>.gate_proj.weight [I, d], ...<e>.up_proj.weight [I, d]
    ...mlp.experts.down_proj [E, d, I]         ...mlp.experts.<e>.down_proj.weight [d, I]

Nothing is copied: what is published of a stack are views of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rljob_trainer.weights.shards import Shard

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """A matrix of a stack: its name in files, and which rows of which expert's it is."""

    name: str
    expert: int
    rows: slice


def pieces(name: str, shape: Sequence[int]) -> Iterator[StackedMatrix]:
    """The matrices of the stack ``name``, in the order of memory; none where the parameter is no stack."""
    if name.endswith(_GATE_UP):
        inner = shape[1] // 2
        for expert in range(shape[0]):
            own = f"{name.removesuffix('gate_up_proj')}{expert}"
            yield StackedMatrix(f"{own}.gate_proj.weight", expert, slice(0, inner))
            yield StackedMatrix(f"{own}.up_proj.weight", expert, slice(inner, 2 * inner))
    elif name.endswith(_DOWN):
        for expert in range(shape[0]):
            yield StackedMatrix(
                f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", expert, slice(0, shape[1])
            )


def file_names(name: str, shape: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in files of what the parameter ``name`` of this shape holds."""
    found: list[tuple[str, tuple[int, ...]]] = [
        (piece.name, (piece.rows.stop - piece.rows.start, shape[2])) for piece in pieces(name, shape)
    ]
    return found or [(name, tuple(shape))]


def tensors(name: str, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What is published of a whole parameter."""
    found = [(piece.name, whole[piece.expert, piece.rows]) for piece in pieces(name, whole.shape)]
    yield from found or [(name, whole)]


def shards(shard: Shard) -> Iterator[Shard]:
    """The parts of published tensors that a rank's part of a parameter holds."""
    stack = False
    for piece in pieces(shard.name, shard.shape):
        stack = True
        expert = piece.expert - shard.offset[0]
        first = max(piece.rows.start, shard.offset[1])
        last = min(piece.rows.stop, shard.offset[1] + shard.tensor.shape[1])
        if not 0 <= expert < shard.tensor.shape[0] or first >= last:
            continue
        yield Shard(
            piece.name,
            (piece.rows.stop - piece.rows.start, shard.shape[2]),
            (first - piece.rows.start, shard.offset[2]),
            shard.tensor[expert, first - shard.offset[1] : last - shard.offset[1]],
            shard.answers,
        )
    if not stack:
        yield shard
