"""What a version of the weights is: one line for each published tensor, and the SHA-256 over all lines.

A line has the tensor's Hugging Face name, shape, dtype and sum (``sums.py``). Sums are linear: the owners of shards add
up their own in any layout, and so does whoever receives tensors in buckets; a delta changes the lines of what it
changes. Two processes with equal manifests were given the same bytes. What an engine makes of them, and whether they
still lie in its memory, are other questions (``residence.py``, ``publish/canaries.py``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rljob_trainer.weights.plan import TensorMeta
from rljob_trainer.weights.sums import sums_of, unsigned

_AT_ONCE = 1 << 20
"""Bytes of small tensors that are added up together: whoever gathers them keeps so many."""
_64_BITS = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Version:
    """A policy's weights: the number that tokens carry, and what they are."""

    number: int
    manifest_sha256: str

    def __str__(self) -> str:
        return f"version {self.number} (manifest {self.manifest_sha256[:12]})"


class Manifest:
    """The lines of all tensors, in the order of their names. Immutable."""

    def __init__(self, lines: Iterable[tuple[TensorMeta, int]]) -> None:
        """``lines``: tensors with their sums (below 2^64), in any order. Raises ``ValueError`` for a name that comes
        twice."""
        self.lines = tuple(sorted(lines, key=lambda line: line[0].name))
        self.sums: Mapping[str, int] = {meta.name: number for meta, number in self.lines}
        if len(self.sums) < len(self.lines):
            raise ValueError("a manifest has one line for each name")

    @property
    def text(self) -> str:
        """The canonical text: a JSON array of name, shape, dtype and sum in hexadecimal on each line, by name."""
        return "".join(
            json.dumps([meta.name, meta.shape, str(meta.dtype).removeprefix("torch."), f"{number:016x}"]) + "\n"
            for meta, number in self.lines
        )

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.lines == other.lines

    def __hash__(self) -> int:
        return hash(self.lines)

    def version(self, number: int) -> Version:
        """The version that has this number and these weights."""
        return Version(number, self.sha256)

    def differing(self, other: Manifest) -> list[str]:
        """Names of the tensors whose lines differ or that only one of the two has."""
        ours, theirs = ({meta.name: (meta, number) for meta, number in one.lines} for one in (self, other))
        return [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


class Addition:
    """A manifest that is being made: tensors are added up as they come by. ``manifest`` waits for a GPU once."""

    def __init__(self) -> None:
        self._metas: list[TensorMeta] = []
        self._sums: list[Tensor] = []

    def add(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Whole tensors of one device; their bytes may change afterwards."""
        if named:
            self._metas += [TensorMeta(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named]
            self._sums.append(sums_of([tensor for _, tensor in named]))

    def manifest(self) -> Manifest:
        """The manifest of all that were added."""
        numbers = torch.cat([part.cpu() for part in self._sums]).tolist() if self._sums else []
        return Manifest(zip(self._metas, map(unsigned, numbers), strict=True))


def manifest_of(named: Iterable[tuple[str, Tensor]]) -> Manifest:
    """The manifest of whole tensors under their Hugging Face names."""
    addition = Addition()
    some: list[tuple[str, Tensor]] = []
    for name, tensor in named:
        if some and tensor.device != some[0][1].device:
            addition.add(some)
            some = []
        some.append((name, tensor))
        if sum(each.nbytes for _, each in some) >= _AT_ONCE:
            addition.add(some)
            some = []
    addition.add(some)
    return addition.manifest()


def added_up(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sums of whole tensors by name from those of their owners."""
    totals: dict[str, int] = {}
    for part in parts:
        for name, number in part.items():
            totals[name] = (totals.get(name, 0) + number) & _64_BITS
    return totals
