"""verl's side: its own functions on the padded rectangle, with the arguments that its trainer passes.

Needs verl 0.9.1 and what it imports on the path (`environments.overlay`); nothing of it is in our environment.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_policy_loss_vanilla,
)
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig

from benchmarks.algorithms.ours import Result
from benchmarks.algorithms.workload import Workload

ACTOR = ActorConfig(
    strategy="fsdp",
    rollout_n=8,
    ppo_micro_batch_size_per_gpu=8,
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    clip_ratio_c=3.0,
)


class Theirs:
    """One method a case."""

    def __init__(self, workload: Workload) -> None:
        self.groups = workload.groups
        self.streams = workload.padded
        # For the cases that take a score a sequence: all of it at one token, as its reward functions leave it.
        self.outcomes = torch.zeros_like(self.streams.rewards)
        self.outcomes[torch.arange(len(workload.lengths)), torch.from_numpy(workload.lengths) - 1] = workload.scores

    def gae(self) -> Result:
        streams = self.streams
        advantages, returns = compute_gae_advantage_return(
            streams.rewards, streams.values, streams.mask, gamma=0.999, lam=0.95
        )
        return {"advantages": advantages, "returns": returns}, {}

    def grpo(self) -> Result:
        return {"advantages": compute_grpo_outcome_advantage(self.outcomes, self.streams.mask, self.groups)[0]}, {}

    def grpo_vectorized(self) -> Result:
        found, _ = compute_grpo_vectorized_outcome_advantage(self.outcomes, self.streams.mask, self.groups)
        return {"advantages": found}, {}

    def grpo_of_token_rewards(self) -> Result:
        found, _ = compute_grpo_outcome_advantage(self.streams.rewards, self.streams.mask, self.groups)
        return {"advantages": found}, {}

    def correction_of_tokens(self) -> Result:
        return self._correct("token", "seq_mean_k3", "0.01")

    def correction_of_sequences(self) -> Result:
        return self._correct("sequence", "seq_max_k2", "0.5")

    def _correct(self, weights: str, rejection: str, threshold: str) -> Result:
        streams = self.streams
        proto, mask, metrics = compute_rollout_correction_and_rejection_mask(
            streams.old_log_probs,
            streams.rollout_log_probs,
            streams.mask,
            rollout_is=weights,
            rollout_is_threshold=2.0,
            rollout_rs=rejection,
            rollout_rs_threshold=threshold,
        )
        return {"mask": mask, "weights": proto.batch["rollout_is_weights"]}, metrics

    def policy_loss(self) -> Result:
        streams = self.streams
        leaf = streams.log_probs.detach().requires_grad_()
        loss, metrics = compute_policy_loss_vanilla(
            streams.old_log_probs, leaf, streams.advantages, streams.mask, "token-mean", ACTOR
        )
        loss.backward()
        return {"gradient": leaf.grad}, {**metrics, "loss": loss.item()}

    def __getitem__(self, case: str) -> Callable[[], Result]:
        found: Callable[[], Result] = getattr(self, case)
        return found
