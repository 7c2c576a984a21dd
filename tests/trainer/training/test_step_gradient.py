"""A whole step against plain PyTorch in float64: transformers' own forward pass over a padded batch, and the losses as
the papers have them. Nothing is shared with the code under test but the weights before each optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from watched_step import SCORES, Watched, groups_of, spec_of

from rljob_trainer.episodes.episode import Group
from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.optim import StepOutcome
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings
from rljob_trainer.learner.trained import Trained
from rljob_trainer.models.materialise import materialise
from rljob_trainer.training.step import TrainingStep

TEMPERATURE, KL, BONUS, CLIP, DUAL, VALUE_CLIP, GAMMA, LAMBDA, SHAPE = 0.7, 0.3, 0.02, 0.05, 1.5, 0.05, 0.9, 0.8, 0.2


class Padded:
    """The same sequences side by side; per-token matrices are ``[S, longest response]``, 0 behind an end."""

    def __init__(self, groups: list[Group]) -> None:
        self.episodes = [e for g in groups for e in g.episodes]
        self.responses = [e.response_ids for e in self.episodes]
        prompts = [g.prompt.token_ids for g in groups for _ in g.episodes]
        whole = [torch.tensor([*p, *ids]) for p, ids in zip(prompts, self.responses, strict=True)]
        self.ids = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
        self.longest = max(map(len, self.responses))
        self.first = len(prompts[0])
        self.mask = torch.tensor([[t < len(ids) for t in range(self.longest)] for ids in self.responses])
        self.ends = self.first - 1 + self.mask.sum(1)

    def policy(self, model: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy."""
        responses = self.ids[rows, self.first :]
        every = (model(self.ids[rows]).logits[:, self.first - 1 : -1] / TEMPERATURE).log_softmax(-1)
        return every.gather(2, responses[..., None])[..., 0], -(every.exp() * every).sum(-1)

    def values(self, model: Any, head: list[Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Before each token, and behind the last one."""
        every = model.base_model(self.ids[rows]).last_hidden_state @ head[0][0] + head[1]
        return every[:, self.first - 1 : -1], every.gather(1, self.ends[rows, None])[:, 0]


def mean_of(stream: Tensor, mask: Tensor) -> Tensor:
    return stream[mask].mean()


def gae(rewards: Tensor, values: Tensor, finals: Tensor, padded: Padded) -> tuple[Tensor, Tensor]:
    """arXiv 1506.02438, equation 16; a truncated response goes on with the critic's value."""
    advantages = torch.zeros_like(rewards)
    for row, sample in enumerate(padded.episodes):
        next_value, following = (finals[row] if sample.finish == "length" else 0.0), 0.0
        for t in reversed(range(sample.response_tokens)):
            delta = rewards[row, t] + GAMMA * next_value - values[row, t]
            following = advantages[row, t] = delta + GAMMA * LAMBDA * following
            next_value = values[row, t]
    kept = advantages[padded.mask]
    return (advantages - kept.mean()) / (kept.var() + 1e-8).sqrt(), advantages + values


@pytest.mark.parametrize("lanes", [1, 2])
async def test_every_gradient_of_a_ppo_step_is_that_of_its_losses(tmp_path: Path, lanes: Any) -> None:
    """Two epochs of mini-batches of two groups and of one; KL in the reward and in the loss, entropy, dual and value
    clip, a bootstrap, and a temperature."""
    spec = spec_of(
        preset="ppo",
        advantage={"gamma": GAMMA, "lambda": LAMBDA},
        policyLoss={"clipLow": CLIP, "clipHigh": CLIP, "dualClip": DUAL},
        kl={"inReward": {"kind": "k1", "coefficient": SHAPE}, "inLoss": {"kind": "k3", "coefficient": KL}},
        entropyCoefficient=BONUS,
        critic={"valueClip": VALUE_CLIP},
        truncated={"bootstrap": True},
    )
    folder = materialise(spec.model, tmp_path / "model").path
    optimizer = OptimizerSettings(learning_rate=5e-3)
    rank = Fsdp2().start(LearnerSettings(folder, actor=optimizer, critic=optimizer, reference=True, lanes=lanes))
    assert rank.critic is not None
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in [p for trained in rank._trained for p in trained.module.parameters()]:
            parameter.add_(0.05 * torch.randn_like(parameter))
    groups = groups_of(SCORES)
    padded, every = Padded(groups), torch.arange(12)
    actor, critic, reference = (AutoModelForCausalLM.from_pretrained(folder).double() for _ in range(3))
    head = [p.detach().double().requires_grad_() for p in rank.critic.module.head.parameters()]
    ours = {
        "actor": dict(zip(actor.parameters(), rank.actor.module.parameters(), strict=True)),
        "critic": dict(
            zip([*critic.base_model.parameters(), *head], rank.critic.module.parameters(), strict=True),
        ),
    }

    @torch.no_grad()
    def copied(name: str) -> None:
        for theirs, own in ours[name].items():
            theirs.copy_(own)
            theirs.grad = None

    copied("actor")
    copied("critic")
    with torch.no_grad():
        old, known = padded.policy(actor, every)[0], padded.policy(reference, every)[0]
        old_values, finals = padded.values(critic, head, every)
    rewards = -SHAPE * (old - known)
    for row, sample in enumerate(padded.episodes):
        assert sample.reward is not None
        rewards[row, sample.response_tokens - 1] += sample.reward.score
    advantages, returns = gae(rewards, old_values, finals, padded)

    def actor_loss(rows: Tensor) -> Tensor:
        log_probs, entropy = padded.policy(actor, rows)
        a, ratio = advantages[rows], (log_probs - old[rows]).exp()
        objective = torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)
        objective = torch.where(a < 0, torch.maximum(objective, DUAL * a), objective)
        d = log_probs - known[rows]
        return mean_of(-objective + KL * ((-d).exp() + d - 1) - BONUS * entropy, padded.mask[rows])

    def critic_loss(rows: Tensor) -> Tensor:
        values, target, near = padded.values(critic, head, rows)[0], returns[rows], old_values[rows]
        clipped = near + (values - near).clamp(-VALUE_CLIP, VALUE_CLIP)
        return mean_of(torch.maximum((values - target) ** 2, (clipped - target) ** 2) / 2, padded.mask[rows])

    losses: dict[str, Callable[[Tensor], Tensor]] = {"actor": actor_loss, "critic": critic_loss}
    learner, take, compared = Watched(rank), rank._step, []

    def step(trained: Trained) -> StepOutcome:
        mini_batches = learner.updates[-1][2]
        copied(trained.name)
        losses[trained.name](torch.tensor(mini_batches[compared.count(trained.name)])).backward()
        for theirs, own in ours[trained.name].items():
            expected = np.zeros(theirs.shape) if theirs.grad is None else theirs.grad.numpy()
            assert own.grad is not None
            np.testing.assert_allclose(own.grad.numpy(), expected, rtol=1e-3, atol=2e-6)
        compared.append(trained.name)
        return take(trained)

    rank._step = step  # type: ignore[method-assign]
    cut = spec.batch.model_copy(update={"mini_batch_groups": 2, "epochs": 2})
    job_step = TrainingStep(spec.algorithm, cut, learner, temperature=TEMPERATURE, seed=0)  # type: ignore[arg-type]
    metrics = (await job_step.run(groups, number=1, version=0)).metrics
    assert sorted(compared) == ["actor"] * 4 + ["critic"] * 4
    assert metrics["actor/clip_fraction"] > 0
    assert metrics["critic/clip_fraction"] > 0
