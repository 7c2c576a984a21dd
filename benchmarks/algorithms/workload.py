"""The batch that both sides work on, in both layouts: packed streams (ours) and a padded rectangle (theirs).

The numbers are the same: a packed stream is what the rectangle holds at its real tokens, row after row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Shape = Literal["ragged", "tools", "dense"]
SHAPES: tuple[Shape, ...] = ("ragged", "tools", "dense")
GROUP = 8
REAL_SHARE = 0.14
TOOL_SHARE = 0.25
LOG_SPREAD = 1.0


@dataclass(frozen=True, eq=False)
class Streams:
    """One layout of the batch: ``[tokens]`` packed or ``[B, T]`` padded with 0; float32, the mask bool or int64."""

    mask: Tensor
    rewards: Tensor
    values: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    log_probs: Tensor
    advantages: Tensor


@dataclass(frozen=True, eq=False)
class Workload:
    """B sequences in groups of eight; ``real [B, T]`` says where the rectangle holds a token (masked or not)."""

    lengths: np.ndarray  # [B] int64
    groups: np.ndarray  # [B] int64
    scores: Tensor  # [B]
    real: Tensor  # [B, T] bool
    padded: Streams
    packed: Streams

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def unpack(self, stream: Tensor) -> Tensor:
        """A packed stream as a rectangle, 0 in the padding."""
        rectangle = torch.zeros(self.real.shape, dtype=stream.dtype)
        rectangle[self.real] = stream
        return rectangle


def lognormal_lengths(rows: int, longest: int, share: float, seed: int) -> np.ndarray:
    """``[rows]`` lengths in 1 .. longest, lognormal and cut at ``longest``, filling ``share`` of the rectangle.

    The longest response stands in the batch, as the rectangle is as wide as it.
    """
    normal = np.random.default_rng(seed).standard_normal(rows)

    def lengths(centre: float) -> np.ndarray:
        return np.clip(np.exp(centre + LOG_SPREAD * normal), 1, longest).astype(np.int64)

    low, high = 0.0, float(np.log(longest))
    for _ in range(60):
        centre = (low + high) / 2
        low, high = (centre, high) if lengths(centre).mean() < share * longest else (low, centre)
    found = lengths(low)
    found[int(found.argmax())] = longest
    return found


def make(shape: Shape, rows: int = 1024, longest: int = 8192, seed: int = 0) -> Workload:
    """``ragged``: about 14 % real; ``tools``: the same, a quarter of it tool output; ``dense``: all real."""
    if shape == "dense":
        lengths = np.full(rows, longest, dtype=np.int64)
    else:
        lengths = lognormal_lengths(rows, longest, REAL_SHARE, seed)
    generator = torch.Generator().manual_seed(seed)
    real = torch.arange(longest)[None, :] < torch.from_numpy(lengths)[:, None]
    tokens = int(lengths.sum())

    def noise(scale: float = 1.0) -> Tensor:
        return torch.randn(tokens, generator=generator) * scale

    mask = torch.ones(tokens, dtype=torch.bool)
    if shape == "tools":  # in blocks of 64 tokens, never at a sequence's first
        block = torch.arange(tokens) // 64
        mask = torch.rand(int(block[-1]) + 1, generator=generator)[block] >= TOOL_SHARE
        mask[torch.from_numpy(np.cumsum(lengths) - lengths)] = True
    old = -noise().abs() * 0.5
    rollout = (old + noise(0.02) * (1 + 20 * (noise() > 2.5))).clamp(max=0)
    scores = torch.randint(0, 2, (rows,), generator=generator).float()
    rewards = -0.001 * noise(0.1)
    ends = np.cumsum(lengths)
    position = torch.where(mask, torch.arange(tokens), 0).cummax(0).values  # of the last kept token up to here
    last = position[torch.from_numpy(ends - 1)]
    rewards[last] += scores
    packed = Streams(
        mask=mask,
        rewards=torch.where(mask, rewards, 0),
        values=noise(0.3) + 0.4,
        old_log_probs=old,
        rollout_log_probs=rollout,
        log_probs=(old + noise(0.1)).clamp(max=0),
        advantages=torch.where(mask, noise(), 0),
    )

    def rectangle(stream: Tensor) -> Tensor:
        padded = torch.zeros(rows, longest, dtype=stream.dtype)
        padded[real] = stream
        return padded

    streams = {name: rectangle(getattr(packed, name)) for name in Streams.__dataclass_fields__}
    streams["mask"] = streams["mask"].long()  # as its trainer makes it from the attention mask
    groups = np.repeat(np.arange(rows // GROUP), GROUP)
    return Workload(lengths, groups, scores, real, Streams(**streams), packed)
