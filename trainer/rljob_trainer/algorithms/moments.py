"""Statistics that are gathered piece by piece and add up, and their way to the host. Knows nothing of policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import Any, TypeVar

import torch
from torch import Tensor

from rljob_trainer.algorithms.segments import all_kept

Metrics = dict[str, Tensor]
Seen = TypeVar("Seen")


def floats(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics on the host."""
    values = torch.stack([t.double() for t in tensors.values()]).tolist() if tensors else []
    return dict(zip(tensors, values, strict=True))


def joined(pieces: Sequence[Seen]) -> Seen:
    """What was seen of all pieces: vectors ``[S]`` follow each other, sums and moments add up."""
    first = pieces[0]

    def join(name: str) -> Any:
        values = [getattr(piece, name) for piece in pieces]
        is_vector = isinstance(values[0], Tensor) and values[0].ndim > 0
        return torch.cat(values) if is_vector else reduce(add, values)

    return type(first)(**{field.name: join(field.name) for field in fields(first)})  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, sums and extremes ``[]`` (float64) of some values; they add up."""

    count: Tensor
    total: Tensor
    squares: Tensor
    low: Tensor
    high: Tensor

    @staticmethod
    def of(values: Tensor, counted: Tensor) -> Moments:
        """Moments of the values where ``counted`` (bool, the same shape) is True."""
        if not all_kept(counted):
            low, high = torch.where(counted, values, torch.inf), torch.where(counted, values, -torch.inf)
            values = torch.where(counted, values, 0)
        else:
            low = high = values
        wide, empty = values.double(), values.new_full((), torch.inf)
        return Moments(
            torch.count_nonzero(counted).double(),
            wide.sum(),
            torch.dot(wide, wide),
            (low.amin() if values.numel() else empty).double(),
            (high.amax() if values.numel() else -empty).double(),
        )

    @staticmethod
    def repeated(values: Tensor, times: Tensor) -> Moments:
        """Moments of values ``[S]``, each counted ``times [S]`` (integers): a sequence's value at all its tokens."""
        there, wide = times > 0, values.double()
        wide = torch.where(there, wide, 0)
        extremes = Moments.of(wide, there)
        return Moments(
            times.sum().double(), torch.dot(wide, times.double()), torch.dot(wide.square(), times.double()),
            extremes.low, extremes.high,
        )  # fmt: skip

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
        )

    @property
    def mean(self) -> Tensor:
        return self.total / self.count.clamp(min=1)

    def metrics(self, name: str, divisor: Tensor | float = 1.0) -> Metrics:
        """mean, min, max and (population) std of the values over ``divisor``; 0 when there is none."""
        variance = self.squares / self.count.clamp(min=1) - self.mean.square()
        some = self.count > 0
        return {
            f"{name}/mean": self.mean / divisor,
            f"{name}/min": torch.where(some, self.low, 0) / divisor,
            f"{name}/max": torch.where(some, self.high, 0) / divisor,
            f"{name}/std": variance.clamp(min=0).sqrt() / divisor,
        }

    @property
    def effective_size(self) -> Tensor:
        """(mean w)^2 / mean w^2, in (0, 1]: the fraction of samples that count once reweighted; 1 if all are 0."""
        square = self.squares / self.count.clamp(min=1)
        return torch.where(square > 0, self.mean.square() / square.clamp(min=1e-300), 1.0)
