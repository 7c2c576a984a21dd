"""Statistics over the samples of one prompt group: vectors `[S]` with one group id per sample.

All of it is on a handful of numbers, so it is done in float64 and relative to each group's smallest value: rewards that
are equal give advantages of exactly 0, not rounding noise divided by a tiny standard deviation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Groups:
    """Which samples belong together. ``ids [S]`` are any integers, in any order."""

    ids: Tensor

    @cached_property
    def index(self) -> Tensor:
        """``[S]`` int64: the group of each sample as 0 .. G - 1."""
        _, index = torch.unique(self.ids, return_inverse=True)
        return cast(Tensor, index)

    @cached_property
    def count(self) -> int:
        return int(self.index.max()) + 1 if self.index.numel() else 0

    @cached_property
    def sizes(self) -> Tensor:
        """``[S]`` int64: how many samples each sample's group has."""
        return torch.bincount(self.index, minlength=self.count)[self.index]

    def sum(self, values: Tensor) -> Tensor:
        """``[S]``: the sum over each sample's group."""
        return values.new_zeros(self.count).index_add_(0, self.index, values)[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """``[S]``: the mean of each sample's group."""
        low = self.min(values)
        return low + self.sum(values - low) / self.sizes

    def centred(self, values: Tensor) -> Tensor:
        """``[S]``: each value minus its group's mean; exactly 0 when all of the group are equal."""
        shifted = values - self.min(values)
        return shifted - self.sum(shifted) / self.sizes

    def std(self, values: Tensor) -> Tensor:
        """``[S]``: the unbiased standard deviation of each sample's group; 0 in a group of one."""
        return (self.sum(self.centred(values).square()) / (self.sizes - 1).clamp(min=1)).sqrt()

    def min(self, values: Tensor) -> Tensor:
        """``[S]``: the smallest value of each sample's group."""
        return values.new_zeros(self.count).scatter_reduce_(0, self.index, values, "amin", include_self=False)[
            self.index
        ]

    def first(self, chosen: Tensor) -> Tensor:
        """``[S]`` bool: True at the first of each group's chosen samples."""
        position = torch.arange(chosen.numel(), device=chosen.device)
        return chosen & (position == self.min(torch.where(chosen, position, chosen.numel())))

    def max(self, values: Tensor) -> Tensor:
        """``[S]``: the largest value of each sample's group."""
        return -self.min(-values)
