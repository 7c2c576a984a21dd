"""Relations between methods that hold whatever the numbers: what one method becomes in the corner of another."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from ragged import Ragged, batches, make_batch

from rljob_trainer.algorithms import (
    AdvantageInputs,
    LossCounts,
    PolicyInputs,
    Segments,
    actor_loss,
    advantages,
    kl_estimators,
    policy_losses,
)

BATCHES = given(batch=batches(extreme=False))


def inputs(batch: Ragged, **more: Any) -> PolicyInputs:
    streams: dict[str, Any] = {
        "log_probs": batch.stream("log_probs", torch.float64).requires_grad_(),
        "old_log_probs": batch.stream("old", torch.float64),
        "rollout_log_probs": batch.stream("rollout", torch.float64),
        "advantages": batch.stream("advantages", torch.float64),
        "mask": batch.mask,
        "segments": batch.segments,
    }
    return PolicyInputs(**(streams | more))


def loss_and_gradient(name: str, given_: PolicyInputs, **settings_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    per_token = policy_losses[name](given_, **settings_).per_token
    if not per_token.requires_grad:
        return per_token, torch.zeros_like(per_token)
    (gradient,) = torch.autograd.grad(per_token.sum(), given_.log_probs)
    return per_token, gradient


def same(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@settings(max_examples=15)
@given(batch=batches(extreme=False, longest=1))
def test_with_one_token_gspo_is_ppo_without_dual_clip(batch: Ragged) -> None:
    clip = {"clip_low": 0.1, "clip_high": 0.2}
    same(loss_and_gradient("gspo", inputs(batch), **clip), loss_and_gradient("ppoClip", inputs(batch), **clip))


@BATCHES
def test_the_dual_clip_leaves_positive_advantages_alone(batch: Ragged) -> None:
    positive = batch.stream("advantages", torch.float64).abs()
    same(
        loss_and_gradient("ppoClip", inputs(batch, advantages=positive), dual_clip=1.01),
        loss_and_gradient("ppoClip", inputs(batch, advantages=positive)),
    )


@BATCHES
def test_bypass_is_on_policy_when_the_sampling_policy_is_the_present_one(batch: Ragged) -> None:
    present = batch.stream("log_probs", torch.float64)
    bypass = inputs(batch, rollout_log_probs=present)
    on_policy = inputs(batch, old_log_probs=None)
    same(loss_and_gradient("bypassPpoClip", bypass), loss_and_gradient("ppoClip", on_policy))
    same(loss_and_gradient("bypassReinforce", bypass), loss_and_gradient("reinforce", on_policy))


# clipCov and klCov with nothing selected are ppoClip and -A rho; dro is -A log pi where the ratio is 1.
ON_POLICY_GRADIENT = [n for n in policy_losses if n not in ("gmpo", "gspo", "bypassPpoClip", "bypassReinforce")]


@pytest.mark.parametrize("name", ON_POLICY_GRADIENT)
@settings(max_examples=8)
@given(batch=batches(extreme=False))
def test_on_policy_every_token_loss_has_the_gradient_of_reinforce(name: str, batch: Ragged) -> None:
    """One epoch of one mini-batch is plain policy gradient: at ratio 1 no clip binds and the slope is -A."""
    nothing = torch.zeros_like(batch.mask)
    _, gradient = loss_and_gradient(name, inputs(batch, old_log_probs=None, selection=nothing))
    _, plain = loss_and_gradient("reinforce", inputs(batch))
    torch.testing.assert_close(gradient, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
@settings(max_examples=8)
@given(batch=batches(extreme=False))
def test_on_policy_sequence_losses_have_the_gradient_of_reinforce(name: str, batch: Ragged) -> None:
    constant = batch.segments.spread(batch.vector("scores", torch.float64))  # one advantage a sequence
    _, gradient = loss_and_gradient(name, inputs(batch, old_log_probs=None, advantages=constant))
    _, plain = loss_and_gradient("reinforce", inputs(batch, advantages=constant))
    torch.testing.assert_close(gradient, plain, rtol=1e-12, atol=1e-12)


@BATCHES
def test_methods_without_bounds_meet_in_the_importance_weighted_policy_gradient(batch: Ragged) -> None:
    """tis and cispo without a cap, dppo with a trust region that holds everything: -sg(rho) A log pi."""
    free = loss_and_gradient("tis", inputs(batch), ratio_cap=math.inf)
    same(free, loss_and_gradient("cispo", inputs(batch), clip_low=1.0, clip_high=math.inf))
    same(free, loss_and_gradient("dppoTv", inputs(batch), clip_low=1.0, clip_high=1.0, ratio_cap=math.inf))
    same(
        free,
        loss_and_gradient(
            "dppoKl", inputs(batch), divergence_low=math.inf, divergence_high=math.inf, ratio_cap=math.inf
        ),
    )
    # ... whose gradient is that of the unclipped surrogate -A rho.
    _, surrogate = loss_and_gradient("ppoClip", inputs(batch), clip_low=1.0, clip_high=1e9)
    torch.testing.assert_close(free[1], surrogate, rtol=1e-9, atol=1e-12)


@BATCHES
def test_nothing_selected_leaves_ppo_and_the_plain_surrogate(batch: Ragged) -> None:
    nothing = torch.zeros_like(batch.mask)
    same(loss_and_gradient("clipCov", inputs(batch, selection=nothing)), loss_and_gradient("ppoClip", inputs(batch)))
    same(
        loss_and_gradient("klCov", inputs(batch, selection=nothing)),
        loss_and_gradient("ppoClip", inputs(batch), clip_low=1.0, clip_high=1e9),
    )


@BATCHES
def test_dr_grpo_is_rloo_up_to_its_factor(batch: Ragged) -> None:
    given_ = AdvantageInputs(
        mask=batch.mask,
        segments=batch.segments,
        scores=batch.vector("scores", torch.float64),
        groups=torch.tensor(batch.groups),
    )
    sizes = torch.bincount(torch.tensor(batch.groups))[torch.tensor(batch.groups)].double()
    scaled = advantages("grpo", given_, normalize_by_std=False).advantages * batch.segments.spread(sizes / (sizes - 1))
    torch.testing.assert_close(advantages("rloo", given_).advantages, scaled, rtol=1e-12, atol=1e-12)


@BATCHES
def test_gae_with_lambda_1_and_no_values_is_reinforce_plus_plus(batch: Ragged) -> None:
    given_ = AdvantageInputs(
        mask=batch.mask,
        segments=batch.segments,
        rewards=batch.stream("rewards", torch.float64),
        values=torch.zeros(batch.mask.shape, dtype=torch.float64),
    )
    for gamma in (1.0, 0.9):
        one, other = (advantages(name, given_, gamma=gamma) for name in ("gae", "reinforce_plus_plus"))
        torch.testing.assert_close(one.advantages, other.advantages, rtol=1e-9, atol=1e-9)


def test_opo_with_equal_lengths_is_grpo_without_std() -> None:
    batch = make_batch([3, 4], [5] * 7, 0.0, seed=5)
    given_ = AdvantageInputs(
        mask=batch.mask,
        segments=batch.segments,
        scores=batch.vector("scores", torch.float64),
        groups=torch.tensor(batch.groups),
    )
    torch.testing.assert_close(
        advantages("opo", given_).advantages, advantages("grpo", given_, normalize_by_std=False).advantages
    )


def test_a_seeded_update_of_one_epoch_and_one_mini_batch_is_a_plain_policy_gradient_step() -> None:
    """A softmax policy over five actions: PPO's step equals -lr times the gradient of the mean of -A log pi."""
    random = torch.Generator().manual_seed(11)
    logits = torch.randn(5, generator=random, dtype=torch.float64)
    actions = torch.randint(0, 5, (12,), generator=random)
    gains = torch.randn(12, generator=random, dtype=torch.float64)
    segments = Segments.from_lengths([4, 3, 5])
    mask = torch.ones(12, dtype=torch.bool)
    settings_ = SimpleNamespace(
        policy_loss="ppoClip",
        policy_loss_params={"dual_clip": 3.0},
        aggregation="tokenMean",
        aggregation_params={},
        kl_kind=None,
        kl_coefficient=0.0,
        entropy_coefficient=0.0,
        value_clip=None,
    )
    weights = logits.clone().requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=0.5)
    log_probs = torch.log_softmax(weights, 0)[actions]
    given_ = PolicyInputs(log_probs, gains, mask, segments, old_log_probs=torch.log_softmax(logits, 0)[actions])
    actor_loss(given_, settings_, LossCounts.of(mask, segments)).loss.backward()
    optimizer.step()

    # d log pi(a) / d logits = onehot(a) - pi
    pi = torch.softmax(logits, 0)
    gradient = torch.zeros(5, dtype=torch.float64)
    for action, gain in zip(actions.tolist(), gains.tolist(), strict=True):
        gradient -= gain * (torch.eye(5, dtype=torch.float64)[action] - pi) / 12
    torch.testing.assert_close(weights.detach(), logits - 0.5 * gradient, rtol=1e-12, atol=1e-12)


def test_straight_through_kl_has_the_gradient_of_k2_and_its_own_value() -> None:
    x = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0, -1.9, -3.0], dtype=torch.float64)
    (slope,) = torch.autograd.grad(kl_estimators["k2"](x, reference).sum(), x)
    for kind in ("k1", "k3"):
        value = kl_estimators[f"{kind}Straight"](x, reference)
        torch.testing.assert_close(value.detach(), kl_estimators[kind](x, reference).detach())
        (gradient,) = torch.autograd.grad(value.sum(), x)
        torch.testing.assert_close(gradient, slope)
        torch.testing.assert_close(gradient, x.detach() - reference)
