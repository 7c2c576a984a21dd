"""Drawing tokens: one random number per (seed, position), and inversion of the distribution function.

A token depends on its request's seed, its position in the response and the logits, never on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rljob_trainer.episodes.tokens import FloatArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE_LEVEL = 256
"""Vocabularies up to this size are summed in one go."""


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit moves every output bit."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


def uniforms(seeds: Sequence[int], length: int) -> FloatArray:
    """``[len(seeds), length]`` numbers in [0, 1): element (i, t) is a function of ``seeds[i]`` and t alone.

    A counter-based generator (SplitMix64 of seed and counter), so any position can be had without those before it.
    """
    keys = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        # Mixed twice, or the streams of seeds s and s + golden would be shifted copies of each other.
        counters = np.arange(1, length + 1, dtype=np.uint64) * _GOLDEN
        bits = _mix(_mix(keys * _GOLDEN + np.uint64(1))[:, None] + counters)
    # 24 bits are what a float32 in [0, 1) holds exactly.
    numbers: FloatArray = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return numbers


def invert_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The tokens ``[n]`` at which the running sum of ``probabilities [n, V]`` exceeds ``uniform [n]`` times the total.

    A token of probability 0 is never chosen. Large vocabularies are summed in blocks first: a running sum over all
    of them would cost more than the softmax.
    """
    vocabulary = probabilities.shape[-1]
    uniform = uniform[:, None]
    if vocabulary <= _ONE_LEVEL:
        return _first_above(probabilities.cumsum(-1), uniform).view(-1)
    width = 64 if vocabulary <= 16_384 else 256
    blocks, rest = divmod(vocabulary, width)
    sums = probabilities[:, : blocks * width].reshape(-1, blocks, width).sum(-1)
    if rest:
        sums = torch.cat((sums, probabilities[:, blocks * width :].sum(-1, keepdim=True)), -1)
    running = sums.cumsum(-1)
    block = _first_above(running, uniform)
    inside = sums.gather(1, block)
    passed = running.gather(1, block) - inside
    # The share of the block that lies below the draw; kept under 1 against rounding.
    share = ((uniform * running[:, -1:] - passed) / inside).clamp_(0.0, 1.0 - 2.0**-24)
    columns = block * width + torch.arange(width, device=block.device)
    members = probabilities.gather(1, columns.clamp(max=vocabulary - 1))
    if rest:
        members = members.masked_fill(columns >= vocabulary, 0.0)
    return (block * width + _first_above(members.cumsum(-1), share)).view(-1)


def _first_above(running: Tensor, share: Tensor) -> Tensor:
    """``[n, 1]``: the first column of ``running [n, k]`` above ``share [n, 1]`` of its last."""
    # With share <= 1 - 2^-24 the product rounds to less than the total, so there always is such a column.
    return torch.searchsorted(running, share * running[:, -1:], right=True)


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """``logits [n, V]`` with minus infinity outside the ``top_k [n]`` largest (0: all) and outside the smallest set
    whose probability reaches ``top_p [n]`` (1: all)."""
    ordered, order = logits.sort(-1, descending=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    dropped = (ranks >= top_k[:, None]) & (top_k > 0)[:, None]
    probabilities = ordered.masked_fill(dropped, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    dropped |= (before >= top_p[:, None]) & (top_p < 1)[:, None]
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter_(-1, order, dropped), -torch.inf)


def draw(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: Tensor | None = None,
    greedy: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token and its log-probability per row of ``logits [n, V]``: two tensors ``[n]``.

    ``temperature [n]`` (None: 1), ``greedy [n]`` (bool; None: nobody); ``top_k`` and ``top_p`` (``[n]``) come together
    or not at all. The log-probability is that of the distribution drawn from. ``logits`` may be overwritten.
    """
    logits = logits.float()
    if temperature is not None:
        logits = logits.div_(temperature[:, None])
    if top_k is not None and top_p is not None:
        logits = keep_top(logits, top_k, top_p)
    probabilities = logits.softmax(-1)
    tokens = invert_cdf(probabilities, uniform)
    if greedy is not None:
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    # A token that can be drawn has a probability far above float32's smallest, so its logarithm is exact to rounding.
    return tokens, probabilities.gather(1, tokens[:, None]).view(-1).log_()
