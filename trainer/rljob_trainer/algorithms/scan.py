"""Discounted sums from the end of every sequence, without a loop over time.

`y_t = x_t + decay * y_next`, where `next` is the next token of the same sequence that the mask keeps. GAE and
discounted returns are both this recurrence.

Sequences are cut into blocks of 64 tokens. Inside a block the recurrence is a product with the triangular matrix of
powers of `decay`; what flows from block to block is the same recurrence with `decay ** 64`, over 64 times fewer
elements. Only non-negative powers appear, so nothing over- or underflows and nothing is divided. Everything is added up
in float64: rounding would otherwise grow with the length when the decay is near 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.segments import Segments

BLOCK = 64


@torch.no_grad()
def discounted_sum(stream: Tensor, decay: float, segments: Segments, mask: Tensor) -> Tensor:
    """``[tokens]``: the discounted sum of the masked tokens from each masked token to its sequence's end.

    ``decay`` is in [0, 1]. Tokens with mask False are skipped (they cost no discount) and get 0. Sequences are
    independent. Memory is a few streams; sizes depend on host integers only, so a GPU is never waited for.
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"a discount must be between 0 and 1, but is {decay}")
    kept = torch.where(mask, stream, 0)
    if decay == 0.0 or segments.tokens == 0:
        return kept
    rank = torch.cumsum(mask, 0) - 1  # index of each kept token among all kept tokens
    counts = segments.count(mask)
    starts = counts.cumsum(0) - counts
    sums = _scan(kept.double(), rank - segments.spread(starts), segments, counts, mask, decay)
    return torch.where(mask, sums, 0).to(stream.dtype)


def _scan(
    stream: Tensor, position: Tensor, segments: Segments, counts: Tensor, mask: Tensor | None, decay: float
) -> Tensor:
    """The recurrence over the kept elements of a float64 stream.

    ``position [n]`` numbers them 0, 1, ... in their sequence, ``counts [S]`` says how many each has.
    """
    blocks = stream.numel() // BLOCK + len(segments)  # enough, whatever the lengths are
    per_sequence = (counts + (BLOCK - 1)) // BLOCK  # [S]
    first_block = per_sequence.cumsum(0) - per_sequence  # [S]
    place = segments.spread(first_block * BLOCK) + position
    if mask is not None:
        place = torch.where(mask, place, blocks * BLOCK)  # one spare element takes all that is masked
    laid_out = stream.new_zeros(blocks * BLOCK + 1)
    laid_out[place] = stream
    grid = laid_out[:-1].view(blocks, BLOCK)

    exponents = torch.arange(BLOCK + 1, dtype=torch.float64, device=stream.device)
    powers = torch.pow(decay, exponents)
    distance = exponents[:BLOCK, None] - exponents[None, :BLOCK]  # [from, to]
    triangle = torch.where(distance >= 0, torch.pow(decay, distance.clamp(min=0)), 0.0)
    local = grid @ triangle

    if segments.longest > BLOCK:
        carried = _carry(local[:, 0], per_sequence, blocks, -(-segments.longest // BLOCK), decay**BLOCK)
        local.addcmul_(carried[:, None], powers[1:].flip(0)[None, :])
    laid_out[:-1] = local.view(-1)
    return laid_out[place]


def _carry(heads: Tensor, per_sequence: Tensor, blocks: int, longest: int, decay: float) -> Tensor:
    """``[blocks]``: what enters each block from the blocks behind it, given each block's own first value."""
    # The blocks beyond the last sequence's last one form a sequence of their own; all of them are 0.
    lengths = torch.cat([per_sequence, (blocks - per_sequence.sum()).reshape(1)])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    segments = Segments(offsets, blocks, max(longest, 1))
    whole = _scan(heads, segments.positions, segments, lengths, None, decay) if decay > 0.0 else heads
    following = torch.cat([whole[1:], whole.new_zeros(1)])
    last = torch.zeros(blocks + 1, dtype=torch.bool, device=heads.device)
    last[offsets[1:] - 1] = True  # an empty sequence marks its predecessor's last block, or the spare element
    return torch.where(last[:blocks], 0, following)
