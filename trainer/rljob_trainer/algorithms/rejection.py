"""Which tokens or sequences are left out because trainer and engine disagree too much about them.

With l = log pi_old - log pi_roll of a token, clamped to +-20, the statistics are k1 = l, k2 = l^2 / 2 and
k3 = e^l - 1 - l. With p = pi_roll and q = pi_old of the token, tv = |q - p| and binaryKl = KL(p, q) between "this
token" and "any other" (the divergences of DPPO's binary mask, arXiv 2602.04879). Each is looked at per token, or
summed, averaged or maximised over a sequence, which is then left out whole. One name, one meaning: the bounds of k1 are
bounds of pi_old / pi_roll.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rljob_trainer.algorithms.segments import Segments

LOG_RATIO_BOUND = 20.0
LOG_PROB_BOUND = 1e4
"""A probability of 0 has a log-prob of minus this, so that differences of two stay numbers."""
Statistic = Literal["k1", "k2", "k3", "tv", "binaryKl"]
Over = Literal["token", "sequenceSum", "sequenceMean", "sequenceMax"]
_STATISTIC_NAMES = {"k1": "k1", "k2": "k2", "k3": "k3", "tv": "tv", "binaryKl": "binary_kl"}
_OVER_NAMES = {
    "token": "token",
    "sequenceSum": "sequence_sum",
    "sequenceMean": "sequence_mean",
    "sequenceMax": "sequence_max",
}


@dataclass(frozen=True)
class Rejection:
    """One rule. k1 keeps low <= pi_old / pi_roll <= high, the others keep values <= high.

    ``low`` is 1 / high if not given. Over "sequenceMax" a single token beyond the bounds rejects the sequence; `veto`
    is such a rule.
    """

    statistic: Statistic
    over: Over = "token"
    high: float = math.inf
    low: float | None = None

    def __post_init__(self) -> None:
        if self.statistic not in _STATISTIC_NAMES or self.over not in _OVER_NAMES:
            raise ValueError(f"there is no rejection of {self.statistic} over {self.over}")
        if self.high <= 0:
            raise ValueError(f"the upper bound of a rejection must be above 0, but is {self.high}")
        if self.statistic == "k1" and not 0 <= self.lower < self.high:
            raise ValueError(f"the bounds of a rejection must be 0 <= low < high, but are {self.lower} and {self.high}")
        if self.statistic != "k1" and self.low is not None:
            raise ValueError(f"{self.statistic} is never negative and has no lower bound: remove `low`")

    @property
    def lower(self) -> float:
        """The lower bound of pi_old / pi_roll (k1 only)."""
        return 1.0 / self.high if self.low is None else self.low

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest value of the statistic that is kept."""
        if self.statistic != "k1":
            return -math.inf, self.high
        return (math.log(self.lower) if self.lower > 0 else -math.inf), math.log(self.high)

    @property
    def name(self) -> str:
        """What metrics call it, for example ``sequence_mean_k3``."""
        return f"{_OVER_NAMES[self.over]}_{_STATISTIC_NAMES[self.statistic]}"


def veto(threshold: float) -> Rejection:
    """Leaves out a whole sequence when any of its tokens has pi_old / pi_roll < ``threshold`` (1e-4 ... 1e-6)."""
    return Rejection("k1", "sequenceMax", low=threshold)


@dataclass(frozen=True, eq=False)
class Verdict:
    """What one rule sees: tensors ``[tokens]`` if it looks at tokens, else ``[S]``."""

    value: Tensor
    above: Tensor  # bool
    below: Tensor  # bool

    @property
    def out(self) -> Tensor:
        return self.above | self.below


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p, q) of "this token" against "any other": p log(p / q) + (1 - p) log((1 - p) / (1 - q)).

    Log-probs that rounding has put above 0 count as 0, and 1 - p and 1 - q as 1e-8 or more in the logarithm.
    """
    log_p, log_q = log_p.clamp(-LOG_PROB_BOUND, 0), log_q.clamp(-LOG_PROB_BOUND, 0)
    rest_p, rest_q = -torch.expm1(log_p), -torch.expm1(log_q)
    return log_p.exp() * (log_p - log_q) + rest_p * torch.log(rest_p.clamp(min=1e-8) / rest_q.clamp(min=1e-8))


def _statistic(statistic: Statistic, log_ratio: Tensor, rollout_log_probs: Tensor) -> Tensor:
    if statistic in ("tv", "binaryKl"):
        old = rollout_log_probs + log_ratio
        if statistic == "tv":
            return (old.exp() - rollout_log_probs.exp()).abs()
        return binary_kl(rollout_log_probs, old)
    clamped = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if statistic == "k2":
        return 0.5 * clamped.square()
    return torch.expm1(clamped) - clamped if statistic == "k3" else clamped


def judge(log_ratio: Tensor, rollout_log_probs: Tensor, mask: Tensor, segments: Segments, rule: Rejection) -> Verdict:
    """Applies one rule to ``log_ratio [tokens]`` = log pi_old - log pi_roll and log pi_roll (0 where the mask is
    False)."""
    value = _statistic(rule.statistic, log_ratio, rollout_log_probs)
    low, high = rule.bounds

    if rule.over == "sequenceMax":
        largest = segments.max(value, mask)
        smallest = -segments.max(-value, mask)
        some = segments.count(mask) > 0
        extreme = torch.where(largest.abs() >= smallest.abs(), largest, smallest)
        return Verdict(torch.where(some, extreme, 0), some & (largest > high), some & (smallest < low))
    if rule.over == "sequenceSum":
        value = segments.sum(value, mask)
    elif rule.over == "sequenceMean":
        value = segments.mean(value, mask)
    return Verdict(value, value > high, value < low)


def rejected(
    log_ratio: Tensor, rollout_log_probs: Tensor, mask: Tensor, segments: Segments, rules: Sequence[Rejection]
) -> Tensor:
    """``[tokens]`` bool: masked tokens that at least one rule leaves out. Streams as in `judge`."""
    gone = torch.zeros_like(mask)
    for rule in rules:
        out = judge(log_ratio, rollout_log_probs, mask, segments, rule).out
        gone |= out if rule.over == "token" else segments.spread(out)
    return gone & mask
