"""Schedules in closed form; AdamW by its definition; what happens to a gradient that is not finite."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from whole_state import parts

from rljob_trainer.learner.optim import Optimizer
from rljob_trainer.learner.rates import learning_rate
from rljob_trainer.learner.settings import OptimizerSettings

PEAK = OptimizerSettings(learning_rate=0.4, warmup_steps=4, min_learning_rate_ratio=0.1)


def test_warm_up_grows_linearly_and_never_gives_zero() -> None:
    assert [learning_rate(PEAK, n, None) for n in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert learning_rate(replace(PEAK, warmup_steps=0), 0, None) == 0.4


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_falling_schedule_ends_at_its_floor(schedule: str) -> None:
    falling = replace(PEAK, schedule=schedule)
    total = 15  # updates 0 .. 14: warm-up 0 .. 3, then 4 .. 14 from the peak to the floor
    assert learning_rate(falling, 3, total) == pytest.approx(0.4)
    assert learning_rate(falling, 4, total) == pytest.approx(0.4)
    assert learning_rate(falling, 9, total) == pytest.approx((0.4 + 0.04) / 2)  # half-way
    assert learning_rate(falling, 14, total) == pytest.approx(0.04)
    assert learning_rate(falling, 99, total) == pytest.approx(0.04)
    quarter = {"linear": 0.75, "cosine": (1 + math.cos(math.pi / 4)) / 2}[schedule]
    assert learning_rate(falling, 4 + 25, 4 + 101) == pytest.approx(0.04 + 0.36 * quarter)
    rates = [learning_rate(falling, n, total) for n in range(4, 15)]
    assert rates == sorted(rates, reverse=True)
    with pytest.raises(ValueError, match=r"stop\.steps"):
        learning_rate(falling, 10, None)


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in (("matrix", (3, 4)), ("norm", (4,)), ("embedding", (5, 2)))
    }


def test_adamw_by_its_definition() -> None:
    """Algorithm 2 of arXiv:1711.05101 in float64: bias-corrected moments, decay of matrices only, clipped gradient."""
    settings = OptimizerSettings(learning_rate=0.1, weight_decay=0.2, betas=(0.8, 0.9), epsilon=1e-6, gradient_clip=0.5)
    ours = parameters()
    optimizer = Optimizer(ours.items(), settings)
    theirs = {name: p.detach().double() for name, p in ours.items()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in theirs.items()}
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 6):
        rate = 0.1 / step
        gradients = {name: torch.randn(p.shape, generator=generator) * step for name, p in ours.items()}
        for name, parameter in ours.items():
            parameter.grad = gradients[name].clone()
        outcome = optimizer.step(rate)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        assert outcome.problem is None
        assert outcome.grad_norm == pytest.approx(norm, rel=1e-5)
        assert all(p.grad is None for p in ours.values())
        for name, p in theirs.items():
            gradient = gradients[name].double() * min(1.0, 0.5 / norm)
            m = 0.8 * moments[name][0] + 0.2 * gradient
            v = 0.9 * moments[name][1] + 0.1 * gradient**2
            moments[name] = (m, v)
            decay = 0.0 if name == "norm" else 0.2
            move = (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-6)
            theirs[name] = p - rate * (move + decay * p)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter.double(), theirs[name], rtol=0, atol=2e-6)


def test_clipping_can_be_off() -> None:
    ours = parameters()
    optimizer = Optimizer(ours.items(), OptimizerSettings(gradient_clip=0.0, learning_rate=1.0))
    for parameter in ours.values():
        parameter.grad = torch.full_like(parameter, 1000.0)
    optimizer.step(0.1)
    state = parts(optimizer.state())
    torch.testing.assert_close(state["matrix.exp_avg"], torch.full((3, 4), 100.0))  # (1 - beta1) * gradient


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named(bad: float) -> None:
    ours = parameters()
    optimizer = Optimizer(ours.items(), OptimizerSettings(learning_rate=0.1))
    for parameter in ours.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0.1)
    before = {name: t.clone() for name, t in (*ours.items(), *parts(optimizer.state()).items())}
    for parameter in ours.values():
        parameter.grad = torch.ones_like(parameter)
    assert ours["embedding"].grad is not None
    ours["embedding"].grad[2, 1] = bad
    outcome = optimizer.step(0.1)
    assert outcome.problem == "the gradient of embedding is not finite"
    for name, tensor in (*ours.items(), *parts(optimizer.state()).items()):
        assert torch.equal(before[name], tensor), name
    assert all(p.grad is None for p in ours.values())
