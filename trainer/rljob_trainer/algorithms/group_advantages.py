"""Advantages of a response relative to the other responses to its prompt; no critic.

Each gives one number per sequence, the same for all its tokens. r_i is a sequence's reward; mean_g, std_g (unbiased)
and n_g are its group's. A group of one carries no signal and gets 0: every method here is registered as needing two
samples, so that validation refuses n = 1 beforehand.
"""

from __future__ import annotations

import torch

from rljob_trainer.algorithms.estimators import AdvantageInputs, AdvantageOutput, advantage_estimator
from rljob_trainer.algorithms.segments import UnfitRewardError
from rljob_trainer.algorithms.segments import whiten as whitened


@advantage_estimator("grpo", smallest_group=2)
def grpo(inputs: AdvantageInputs, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> AdvantageOutput:
    """A_i = (r_i - mean_g) / (std_g + epsilon) (arXiv 2402.03300, section 4.1.2).

    ``normalize_by_std=False`` leaves the division out: Dr. GRPO (arXiv 2503.20783).
    """
    return AdvantageOutput(inputs.spread(_grpo(inputs, inputs.sequence_rewards, normalize_by_std, epsilon)))


def _grpo(inputs: AdvantageInputs, rewards: torch.Tensor, normalize_by_std: bool, epsilon: float) -> torch.Tensor:
    advantages = inputs.grouping.centred(rewards)
    return advantages / (inputs.grouping.std(rewards) + epsilon) if normalize_by_std else advantages


@advantage_estimator("grpo_passk", smallest_group=2)
def grpo_passk(inputs: AdvantageInputs, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> AdvantageOutput:
    """The best response of a group gets its lead over the second best, the others 0 (arXiv 2503.19595, pass@k).

    Divided by (std_g + epsilon) if asked. When two share the best reward the lead is 0.
    """
    rewards, groups = inputs.sequence_rewards, inputs.grouping
    is_best = groups.first(rewards == groups.max(rewards))
    second = groups.max(torch.where(is_best, -torch.inf, rewards))
    lead = torch.where(is_best & (groups.sizes > 1), rewards - second, 0)
    if normalize_by_std:
        lead = lead / (groups.std(rewards) + epsilon)
    return AdvantageOutput(inputs.spread(lead))


@advantage_estimator("rloo", smallest_group=2)
def rloo(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = r_i - mean of the others' rewards = n / (n - 1) (r_i - mean_g) (arXiv 2402.14740)."""
    size = inputs.grouping.sizes.double()
    scale = size / (size - 1).clamp(min=1)
    return AdvantageOutput(inputs.spread(inputs.grouping.centred(inputs.sequence_rewards) * scale))


@advantage_estimator("opo", smallest_group=2)
def opo(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = r_i - sum_j length_j r_j / sum_j length_j (arXiv 2505.23585); lengths count masked tokens."""
    rewards, groups = inputs.sequence_rewards, inputs.grouping
    lengths = inputs.segments.count(inputs.mask).double()
    low = groups.min(rewards)
    baseline = low + groups.sum(lengths * (rewards - low)) / groups.sum(lengths).clamp(min=1)
    return AdvantageOutput(inputs.spread(rewards - baseline))


@advantage_estimator("gpg", smallest_group=2)
def gpg(inputs: AdvantageInputs) -> AdvantageOutput:
    """A_i = S / max(1, rewards that are not 0) (r_i - mean_g), S samples in the batch (arXiv 2504.02546).

    The factor makes up for samples without signal, which would otherwise dilute the mean.
    """
    rewards = inputs.sequence_rewards
    scale = rewards.numel() / (rewards != 0).sum().clamp(min=1).double()
    return AdvantageOutput(inputs.spread(scale * inputs.grouping.centred(rewards)))


@advantage_estimator("maxrl", smallest_group=2)
def maxrl(inputs: AdvantageInputs, *, epsilon: float = 1e-6) -> AdvantageOutput:
    """A_i = (r_i - mean_g) / (mean_g + epsilon) (arXiv 2602.02710): ascends the log of the success rate.

    For rewards that are 0 or 1, or at least not negative; raises ``UnfitRewardError`` naming the sample otherwise.
    """
    rewards = inputs.sequence_rewards
    if bool((rewards < 0).any()):
        row = int((rewards < 0).nonzero()[0])
        raise UnfitRewardError(
            f"maxrl divides by a group's mean reward and needs rewards >= 0, but sample {row} of this batch has "
            f"{float(rewards[row]):g}: give wrong answers 0 instead of a penalty, or use another estimator",
            row,
        )
    groups = inputs.grouping
    return AdvantageOutput(inputs.spread(groups.centred(rewards) / (groups.mean(rewards) + epsilon)))


@advantage_estimator("gdpo", smallest_group=2, needs_parts=True)
def gdpo(
    inputs: AdvantageInputs, *, normalize_by_std: bool = True, epsilon: float = 1e-6, whiten: bool = True
) -> AdvantageOutput:
    """A_i = sum_k w_k GRPO(r^(k))_i, then whitened over the batch's tokens (arXiv 2601.05242).

    Each reward function is normalised in its group before they are added up, so that none drowns another.
    ``inputs.part_weights`` are the w_k, 1 if not given.
    """
    assert inputs.parts is not None
    total = torch.zeros_like(inputs.parts[:, 0], dtype=torch.float64)
    for k in range(inputs.parts.shape[1]):
        weight = 1.0 if inputs.part_weights is None else float(inputs.part_weights[k])
        total += weight * _grpo(inputs, inputs.parts[:, k].double(), normalize_by_std, epsilon)
    advantages = inputs.spread(total)
    return AdvantageOutput(whitened(advantages, inputs.mask) if whiten else advantages)
