"""Generalised advantage estimation: the estimator with a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.estimators import (
    AdvantageInputs,
    AdvantageOutput,
    advantage_estimator,
    refuse_non_finite,
)
from rljob_trainer.algorithms.kept import Kept
from rljob_trainer.algorithms.memory import Scratch, fresh
from rljob_trainer.algorithms.scan import Grid
from rljob_trainer.algorithms.segments import SegmentSpread
from rljob_trainer.algorithms.segments import whiten as whitened


@advantage_estimator("gae", needs_critic=True)
def gae(
    inputs: AdvantageInputs,
    *,
    gamma: float = 1.0,
    lambda_: float = 1.0,
    whiten: bool = True,
    whiten_rewards: bool = False,
) -> AdvantageOutput:
    """A_t = delta_t + gamma lambda A_next, delta_t = r_t + gamma V_next - V_t (arXiv 1506.02438).

    `next` is the next masked token: V and A pass over tool output unchanged. After the last one stands 0 or, for
    truncated responses with ``final_values``, that value. Returns are A + V before whitening.
    ``whiten_rewards`` scales the token rewards beforehand: (r - mean) / sqrt(variance + 1e-8) + mean over the batch's
    tokens, as PPO for text does where rewards come with a KL penalty (arXiv 1909.08593, its published code).

    Computed as the recurrence of the returns, G_t = r_t + gamma ((1 - lambda) V_next + lambda G_next) and A = G - V,
    which is the same and, unlike a sum of thousands of delta, does not lose digits when lambda is 1. Raises
    ``ValueError`` naming the sample when a value is not finite.
    """
    assert inputs.values is not None
    mask, values = inputs.mask, inputs.values
    returns, estimates, scratch = fresh(values), fresh(values), Scratch(values.device)
    bootstrap = None
    if inputs.final_values is not None and inputs.truncated is not None:
        bootstrap = gamma * torch.where(inputs.truncated, inputs.final_values, 0).double()
    rewards = inputs.token_rewards
    if whiten_rewards:
        rewards = whitened(rewards, mask, keep_mean=True)
    spread = SegmentSpread()
    for piece in inputs.segments.pieces:
        here = piece.tokens
        kept = Kept.of(mask[here], piece.segments)
        known = kept.pack(values[here])
        grid = Grid.of(kept.segments, scratch)
        _fill(grid, kept.pack(rewards[here]), known, gamma * (1.0 - lambda_), scratch)
        if bootstrap is not None:
            _add_at_the_end(grid, bootstrap[piece.sequences])
        returns[here] = kept.unpack(grid.sums_to_the_end(gamma * lambda_))
        torch.sub(returns[here], kept.unpack(known), out=estimates[here])
        spread.add(estimates[here], mask[here])  # while it is in the cache
    if not spread.is_finite:
        # One value that is not finite spoils other sequences: name the samples by the values themselves.
        refuse_non_finite("values of the critic", inputs.segments.sum(values, mask))
    return AdvantageOutput(spread.normalise_(estimates, mask, 1e-8) if whiten else estimates, returns)


def _fill(grid: Grid, rewards: Tensor, values: Tensor, share: float, scratch: Scratch) -> None:
    """r_t + share V_next, all packed; behind a sequence's last token stands 0."""
    if share == 0.0 or grid.segments.tokens < 2:
        grid.stream.copy_(rewards)
    else:
        # In the stream's own precision, then widened: both at once is twice as slow.
        narrow = scratch.get("narrow", rewards.numel() - 1, rewards.dtype)
        grid.stream[:-1].copy_(torch.add(rewards[:-1], values[1:], alpha=share, out=narrow))
        grid.stream[-1] = rewards[-1]
        borders = grid.segments.offsets[1:-1]
        lasts = torch.where(borders > 0, borders - 1, grid.segments.tokens)  # the spare 0, if nothing is in front
        own = torch.where(borders > 0, rewards[(borders - 1).clamp(min=0)].double(), 0)
        grid.matrix.view(-1)[lasts] = own


def _add_at_the_end(grid: Grid, amounts: Tensor) -> None:
    """``amounts [S]`` to each sequence's last kept token, if it has one."""
    segments = grid.segments
    filled = segments.lengths[: len(amounts)] > 0
    lasts = (segments.offsets[1 : len(amounts) + 1] - 1).clamp(min=0)
    if grid.segments.tokens:
        grid.stream.index_add_(0, lasts, torch.where(filled, amounts, 0))
