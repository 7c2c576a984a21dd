"""Discounted sums from the end of every sequence, without a loop over time.

`y_t = x_t + decay * y_{t + 1}`: GAE and discounted returns are both this recurrence. The whole flat stream is scanned
as if it were one sequence, in blocks of 64: inside a block the recurrence is a product with the triangular matrix of
powers of `decay`; what flows from block to block is the same recurrence with `decay ** 64` over 64 times fewer
elements. What flowed in from the sequence behind is taken off afterwards. All of it in float64: that leaves ten digits
however large the batch is, where float32 would lose digits with the length when the decay is near 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.kept import Kept
from rljob_trainer.algorithms.segments import Segments

BLOCK = 64


@torch.no_grad()
def discounted_sum(stream: Tensor, decay: float, segments: Segments, mask: Tensor) -> Tensor:
    """``[tokens]``: the discounted sum of the masked tokens from each masked token to its sequence's end.

    ``decay`` is in [0, 1]. Tokens with mask False are skipped (they cost no discount) and get 0. Kept values must be
    finite: one that is not spoils its neighbours' sequences too.
    """
    kept = Kept.of(mask, segments)
    return kept.unpack(sums_to_the_end(kept.pack(stream), decay, kept.segments))


@torch.no_grad()
def sums_to_the_end(stream: Tensor, decay: float, segments: Segments) -> Tensor:
    """The same of a packed stream ``[tokens]``, in which nothing is masked."""
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"a discount must be between 0 and 1, but is {decay}")
    if decay == 0.0 or segments.tokens == 0:
        return stream
    sums = _flat(stream.double(), decay)
    ends = segments.offsets[1:]
    behind = torch.cat([sums, sums.new_zeros(1)]).index_select(0, ends)  # [S] what flowed in from the next sequence
    if decay == 1.0:
        sums -= segments.spread(behind)
    else:
        here = torch.arange(segments.tokens, dtype=torch.int32, device=ends.device)
        distance = (segments.spread(ends.int()) - here).clamp_(max=segments.longest)
        powers = torch.pow(decay, torch.arange(segments.longest + 1, dtype=torch.float64, device=ends.device))
        sums.addcmul_(segments.spread(behind), powers.index_select(0, distance), value=-1.0)
    return sums.to(stream.dtype)


def _flat(stream: Tensor, decay: float) -> Tensor:
    """The recurrence over one unbroken float64 stream ``[n]``."""
    count = stream.numel()
    blocks = -(-count // BLOCK)
    grid = torch.nn.functional.pad(stream, (0, blocks * BLOCK - count)).view(blocks, BLOCK)
    exponents = torch.arange(BLOCK + 1, dtype=torch.float64, device=stream.device)
    powers = torch.pow(decay, exponents)
    distance = exponents[:BLOCK, None] - exponents[None, :BLOCK]  # [from, to]
    local = grid @ torch.where(distance >= 0, torch.pow(decay, distance.clamp(min=0)), 0.0)
    if blocks > 1:
        heads = _flat(local[:, 0], decay**BLOCK) if decay**BLOCK > 0.0 else local[:, 0]
        entering = torch.cat([heads[1:], heads.new_zeros(1)])
        local.addcmul_(entering[:, None], powers[1:].flip(0)[None, :])
    return local.view(-1)[:count]
