"""A batch without its masked tokens: streams packed together for work that must step over what is masked.

Sizes depend on host integers only, so that a GPU is never waited for: a packed stream keeps its length, and what lies
behind the last kept token is 0 and a segment of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_trainer.algorithms.segments import Segments, all_kept


@dataclass(frozen=True, eq=False)
class Kept:
    """Where each kept token goes. ``segments`` cut packed streams into S sequences and the empty rest."""

    mask: Tensor  # [tokens] bool
    place: Tensor | None  # [tokens] position in the packed stream, `tokens` where masked; None: nothing is masked
    segments: Segments

    @staticmethod
    def of(mask: Tensor, segments: Segments) -> Kept:
        """``mask [tokens]`` True: kept."""
        if all_kept(mask):
            offsets = torch.cat([segments.offsets, segments.offsets[-1:]])
            return Kept(mask, None, Segments(offsets, segments.tokens, segments.longest))
        rank = torch.cumsum(mask, 0, dtype=torch.int32)
        kept_before = torch.cat([rank.new_zeros(1), rank]).index_select(0, segments.offsets)  # [S + 1]
        offsets = torch.cat([kept_before, torch.full_like(kept_before[:1], segments.tokens)]).long()
        place = torch.where(mask, rank - 1, segments.tokens).long()
        return Kept(mask, place, Segments(offsets, segments.tokens, segments.longest))

    def pack(self, stream: Tensor) -> Tensor:
        """``[tokens]``: the kept tokens one after the other, then 0."""
        if self.place is None:
            return stream
        packed = stream.new_zeros(stream.numel() + 1)
        return packed.scatter_(0, self.place, stream)[:-1]  # all that is masked goes to the spare element

    def unpack(self, packed: Tensor) -> Tensor:
        """``[tokens]``: each kept token's value at its place, 0 where masked."""
        if self.place is None:
            return packed
        spared = torch.cat([packed, packed.new_zeros(1)])
        return spared.index_select(0, self.place)
