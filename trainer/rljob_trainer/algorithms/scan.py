"""Discounted sums from the end of every sequence, without a loop over time.

`y_t = x_t + decay * y_{t + 1}`: GAE and discounted returns are both this recurrence. A run of sequences is scanned in
blocks of 16: inside a block the recurrence is a product with the triangular matrix of powers of `decay`; what flows
from block to block is the same recurrence with `decay ** 16` over 16 times fewer elements. Blocks in which a sequence
ends get a matrix of their own, without the powers that would carry anything over the border: no number of a sequence
is ever added to another's, so that each has the rounding of its own size alone. All of it in float64: that leaves ten
digits however long a sequence is, where float32 would lose digits with the length when the decay is near 1.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from rljob_trainer.algorithms.kept import Kept
from rljob_trainer.algorithms.memory import Scratch, fresh
from rljob_trainer.algorithms.segments import Segments

BLOCK = 16
FEW = 320  # elements that one product with a triangular matrix takes: no further level


@torch.no_grad()
def discounted_sum(stream: Tensor, decay: float, segments: Segments, mask: Tensor) -> Tensor:
    """``[tokens]``: the discounted sum of the masked tokens from each masked token to its sequence's end.

    ``decay`` is in [0, 1]. Tokens with mask False are skipped (they cost no discount) and get 0. Kept values must be
    finite: one that is not spoils the sequences that share its block, too.
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
        _recur(self.matrix, self.segments.offsets, decay, self._local)
        return self._local.view(-1)[: self.segments.tokens]


def _recur(matrix: Tensor, offsets: Tensor, decay: float, out: Tensor) -> None:
    """The recurrence of every segment of the stream ``matrix [blocks, BLOCK]`` into ``out``.

    ``offsets`` as those of `Segments`; whatever lies behind the last one is 0 and a segment of its own.
    """
    triangle, powers = _powers(decay, BLOCK, matrix.device)
    torch.mm(matrix, triangle, out=out)
    rows, links = _links(offsets, decay)
    own, reach = torch.empty_like(links), torch.empty_like(links)
    values, running, arriving = matrix.index_select(0, rows).T, links.new_zeros(()), links.new_ones(())
    for place in reversed(range(BLOCK)):
        running = torch.addcmul(values[place], links[place], running, out=own[place])
        arriving = torch.mul(links[place], arriving, out=reach[place])
    out.index_copy_(0, rows, own.T)
    entering = _behind(out[:, 0], _block_of(offsets + BLOCK - 1), decay**BLOCK)
    own.addcmul_(reach, entering.index_select(0, rows))
    out.addcmul_(entering[:, None], powers)
    out.index_copy_(0, rows, own.T)


def _links(offsets: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """``[rows]``: the blocks with a segment's last token; and ``[BLOCK, rows]`` what carries each of their tokens' next
    sum over to it: ``decay``, or 0 at a segment's last."""
    borders = offsets[1:-1]
    lasts = (borders - 1).clamp(min=0)
    rows = _block_of(lasts)
    if _waits_for_nothing(rows.device):
        rows, number = rows.unique_consecutive(return_inverse=True)
        links = torch.full((BLOCK + 1, len(rows)), decay, dtype=torch.float64)
        # A border in front of all tokens cuts nothing: it goes to the spare place.
        links[torch.where(borders > 0, lasts % BLOCK, BLOCK), number] = 0.0
        return rows, links[:BLOCK]
    # Without waiting for the device: a row for each border, those of the same block alike.
    within = torch.arange(BLOCK + 1, device=rows.device)[:, None]
    segment = torch.searchsorted(offsets, rows * BLOCK + within, right=True)
    return rows, (segment[:-1] == segment[1:]).double() * decay


def _waits_for_nothing(device: torch.device) -> bool:
    """Whether shapes that depend on numbers cost no wait: on a CPU."""
    return device.type == "cpu"


def _block_of(place: Tensor) -> Tensor:
    return torch.div(place, BLOCK, rounding_mode="floor")


def _behind(stream: Tensor, offsets: Tensor, decay: float) -> Tensor:
    """``[n]``: the recurrence's sums one place further on, whichever segment that is in; 0 at the end."""
    count = stream.numel()
    sums = stream.new_zeros(count + 1)
    if count < FEW:
        triangle, _ = _powers(decay, FEW, stream.device)
        segment = torch.searchsorted(offsets, torch.arange(count, device=stream.device), right=True)
        alike = segment[:, None] == segment[None, :]
        sums[:count] = stream @ torch.where(alike, triangle[:count, :count], 0)
        return sums[1:]
    grid = stream.new_zeros(count // BLOCK + 1, BLOCK)
    grid.view(-1)[:count] = stream
    local = torch.empty_like(grid)
    _recur(grid, offsets, decay, local)
    sums[:count] = local.view(-1)[:count]
    return sums[1:]


@lru_cache(maxsize=16)
def _powers(decay: float, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[from, to]`` decay^(from - to), 0 above the diagonal; and ``[block]`` decay^(block - t) of what flows in."""
    steps = torch.arange(block, dtype=torch.float64, device=device)
    distance = steps[:, None] - steps[None, :]
    triangle = torch.where(distance >= 0, torch.pow(decay, distance.clamp(min=0)), 0.0)
    return triangle, torch.pow(decay, block - steps)
