"""Advantages of a response relative to the other responses to its prompt; no critic.

Each gives one number per sequence, the same for all its tokens. A group of one carries no signal and gets 0; which of
these methods need two samples is in the registry, so that validation refuses n = 1 beforehand.
"""

from __future__ import annotations

from rljob_trainer.algorithms.estimators import AdvantageInputs, AdvantageOutput, advantage_estimator


@advantage_estimator("grpo", smallest_group=2)
def grpo(inputs: AdvantageInputs, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> AdvantageOutput:
    """A_i = (r_i - mean_g) / (std_g + epsilon), std unbiased (arXiv 2402.03300, section 4.1.2).

    ``normalize_by_std=False`` leaves the division out: Dr. GRPO (arXiv 2503.20783, section 3.2).
    """
    rewards = inputs.sequence_rewards
    advantages = inputs.grouping.centred(rewards)
    if normalize_by_std:
        advantages = advantages / (inputs.grouping.std(rewards) + epsilon)
    return AdvantageOutput(inputs.spread(advantages))
