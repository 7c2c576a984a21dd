"""How a model's parameters are cut into buckets. Sender and receivers follow the same plan, in the same order.

A large tensor is a bucket of its own: it can go straight from the learner's memory into the engine's. Others are packed
together: on gloo 150 broadcasts of 3.6 MB take nearly half as long again as 20 of 27 MB. Where a side's parameters can
be laid out as the packs want them (``blocks.py``) a pack is not copied either; elsewhere packs are small enough that
the copies of one overlap with the journey of the next, and that the allocator hands out the same memory again. No
tensor is split, so no process ever holds more than the buckets in flight; a tensor larger than a bucket makes its
bucket that large.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Offsets of packed tensors: any dtype can be viewed in place."""
_PACK_BYTES = 16 << 20
"""Packs are at most this large; larger tensors are not packed."""
_TRAVELLING_BYTES = 3 * _PACK_BYTES
"""On gloo more at once is no faster."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One parameter under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one broadcast carries: tensors at ``offsets`` of ``nbytes`` bytes."""

    tensors: tuple[TensorMeta, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def views(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors in a uint8 buffer ``[>= nbytes]``, without copies."""
        return [
            (meta.name, buffer[offset : offset + meta.nbytes].view(meta.dtype).view(meta.shape))
            for meta, offset in zip(self.tensors, self.offsets, strict=True)
        ]


class WeightPlan:
    """Buckets of at most ``bucket_bytes`` (or one larger tensor) in the order in which they are sent."""

    def __init__(self, tensors: Sequence[TensorMeta], bucket_bytes: int) -> None:
        self.tensors = tuple(tensors)
        self.bucket_bytes = bucket_bytes
        most = min(_PACK_BYTES, bucket_bytes)
        packs: list[list[TensorMeta]] = [[]]
        for meta in self.tensors:
            if meta.nbytes < most:
                if _pack([*packs[-1], meta]).nbytes > most:
                    packs.append([])
                packs[-1].append(meta)
        complete = {pack[-1].name: pack for pack in packs if pack}
        self.buckets: list[Bucket] = []
        """In the order in which they are complete when the tensors come in the model's order."""
        for meta in self.tensors:
            if meta.nbytes >= most:
                self.buckets.append(Bucket((meta,), (0,), meta.nbytes))
            elif meta.name in complete:
                self.buckets.append(_pack(complete[meta.name]))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(meta.nbytes for meta in self.tensors)

    @property
    def packs(self) -> list[Bucket]:
        """The buckets of several tensors."""
        return [bucket for bucket in self.buckets if len(bucket.tensors) > 1]

    def budget(self, device: torch.device) -> int:
        """Bytes that may travel at once from or to a device; a bucket that is larger travels alone."""
        return min(_TRAVELLING_BYTES, self.bucket_bytes) if device.type == "cpu" else self.bucket_bytes

    def to_json(self) -> str:
        tensors = [(meta.name, meta.shape, str(meta.dtype).removeprefix("torch.")) for meta in self.tensors]
        return json.dumps({"bucketBytes": self.bucket_bytes, "tensors": tensors})

    @classmethod
    def from_json(cls, text: str | bytes) -> WeightPlan:
        content = json.loads(text)
        tensors = [TensorMeta(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in content["tensors"]]
        return cls(tensors, content["bucketBytes"])


def describe(named: Iterable[tuple[str, Tensor]]) -> list[TensorMeta]:
    """Names, shapes and dtypes of parameters."""
    return [TensorMeta(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named]


def _pack(tensors: Sequence[TensorMeta]) -> Bucket:
    offsets, end = [], 0
    for meta in tensors:
        offsets.append(end)
        end += (meta.nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    return Bucket(tuple(tensors), tuple(offsets), end)
