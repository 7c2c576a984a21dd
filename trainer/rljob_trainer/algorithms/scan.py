"""Discounted sums from the end of every sequence, without a loop over time.

`y_t = x_t + decay * y_{t + 1}`: GAE and discounted returns are both this recurrence. A run of sequences is scanned as
if it were one, in blocks of 16: inside a block the recurrence is a product with the triangular matrix of powers of
`decay`; what flows from block to block is the same recurrence with `decay ** 16` over 16 times fewer elements. A second
look at those few stops the flow from one sequence into the one before it. All of it in float64: that leaves ten digits
however large the batch is, where float32 would lose digits with the length when the decay is near 1.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from rljob_trainer.algorithms.kept import Kept
from rljob_trainer.algorithms.memory import Scratch, fresh
from rljob_trainer.algorithms.segments import Segments

BLOCK = 16
WIDE_BLOCK = 64  # of the levels above, where the number of operations counts more than their size
FEW = 320  # elements that one product with a triangular matrix takes: no further level


@torch.no_grad()
def discounted_sum(stream: Tensor, decay: float, segments: Segments, mask: Tensor) -> Tensor:
    """``[tokens]``: the discounted sum of the masked tokens from each masked token to its sequence's end.

    ``decay`` is in [0, 1]. Tokens with mask False are skipped (they cost no discount) and get 0. Kept values must be
    finite: one that is not spoils its neighbours' sequences too.
    """
    sums, scratch = fresh(stream), Scratch(stream.device)
    for piece in segments.pieces:
        kept = Kept.of(mask[piece.tokens], piece.segments)
        grid = Grid.of(kept.segments, scratch)
        grid.stream.copy_(kept.pack(stream[piece.tokens]))
        sums[piece.tokens] = kept.unpack(grid.sums_to_the_end(decay))
    return sums


class Grid:
    """A packed run of sequences as a float64 matrix of blocks, with at least one 0 behind the last token."""

    def __init__(self, matrix: Tensor, local: Tensor, segments: Segments) -> None:
        self.matrix = matrix  # [blocks, BLOCK]
        self._local = local  # [blocks, BLOCK], for the sums
        self.segments = segments

    @staticmethod
    def of(segments: Segments, scratch: Scratch) -> Grid:
        """An uninitialised one: fill ``stream``. It holds until the next one is made in the same ``scratch``."""
        blocks = segments.tokens // BLOCK + 1
        flat, local = (scratch.get(name, blocks * BLOCK, torch.float64) for name in ("matrix", "local"))
        flat[segments.tokens :] = 0
        return Grid(flat.view(blocks, BLOCK), local.view(blocks, BLOCK), segments)

    @property
    def stream(self) -> Tensor:
        """``[tokens]`` float64, a view."""
        return self.matrix.view(-1)[: self.segments.tokens]

    def sums_to_the_end(self, decay: float) -> Tensor:
        """``[tokens]`` float64: the discounted sums of ``stream``, which stays as it is."""
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"a discount must be between 0 and 1, but is {decay}")
        if decay == 0.0 or self.segments.tokens == 0:
            return self.stream
        triangle, powers = _powers(decay, BLOCK, self.matrix.device)
        local = torch.mm(self.matrix, triangle, out=self._local)
        if len(self.segments) > 1:
            self._stop_at_borders(local, decay, triangle, powers)
        local.addcmul_(_entering(local, decay)[:, None], powers)
        return local.view(-1)[: self.segments.tokens]

    def _stop_at_borders(self, local: Tensor, decay: float, triangle: Tensor, powers: Tensor) -> None:
        """Takes off, at the last token of each sequence, what will flow in from the first of the next one."""
        offsets = self.segments.offsets
        entering = _entering(local, decay)

        def unbroken(at: Tensor) -> Tensor:
            """The sums at some positions if all were one sequence."""
            row, column = at // BLOCK, at % BLOCK
            return local[row, column] + powers[column] * entering[row]

        firsts = offsets[1:-1]
        following = torch.searchsorted(offsets, firsts, right=True).clamp_(max=len(self.segments))
        next_firsts = offsets[following]
        gap = torch.pow(decay, (next_firsts - firsts).double())
        sums = unbroken(firsts) - gap * unbroken(next_firsts)
        # Where the sequence in front is empty this border is that sequence's own, too: counted once.
        flow = torch.where(self.segments.lengths[:-1] > 0, -decay * sums, 0)
        lasts = (firsts - 1).clamp(min=0)
        local.index_add_(0, lasts // BLOCK, flow[:, None] * triangle[lasts % BLOCK])


def _entering(local: Tensor, decay: float) -> Tensor:
    """``[blocks]``: the sum at the first token behind each block."""
    return _behind(local[:, 0], decay ** local.shape[1])


def _behind(stream: Tensor, decay: float) -> Tensor:
    """The recurrence over one unbroken float64 stream ``[n]``: its sums one place further on, 0 at the end."""
    count = stream.numel()
    if count < FEW:
        triangle, _ = _powers(decay, FEW, stream.device)
        return stream @ triangle[:count, 1 : count + 1]
    grid = stream.new_zeros(count // WIDE_BLOCK + 1, WIDE_BLOCK)
    grid.view(-1)[:count] = stream
    triangle, powers = _powers(decay, WIDE_BLOCK, stream.device)
    local = grid @ triangle
    local.addcmul_(_entering(local, decay)[:, None], powers)
    return local.view(-1)[1 : count + 1]


@lru_cache(maxsize=16)
def _powers(decay: float, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[from, to]`` decay^(from - to), 0 above the diagonal; and ``[block]`` decay^(block - t) of what flows in."""
    steps = torch.arange(block, dtype=torch.float64, device=device)
    distance = steps[:, None] - steps[None, :]
    triangle = torch.where(distance >= 0, torch.pow(decay, distance.clamp(min=0)), 0.0)
    return triangle, torch.pow(decay, block - steps)
