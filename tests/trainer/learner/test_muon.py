"""Muon: against singular values, against torch's own, and the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_for import cut_for
from whole_state import parts, whole

from rljob_trainer.learner.backends.fsdp2 import Fsdp2
from rljob_trainer.learner.backends.fsdp2.mesh import full
from rljob_trainer.learner.models import layer_matrices, load_critic, load_policy
from rljob_trainer.learner.muon import orthogonal
from rljob_trainer.learner.optim import Optimizer
from rljob_trainer.learner.protocol import LossSettings, SequenceBatch
from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings

MUON = OptimizerSettings("muon", learning_rate=0.01, weight_decay=0.1)


@pytest.mark.parametrize("shape", [(16, 16), (16, 40), (40, 16), (3, 16, 24)])
def test_directions_stay_and_sizes_become_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    near = orthogonal(matrices).double()
    # In the matrix's own singular basis the result is diagonal, and what stands there is near 1.
    seen = u.mT @ near @ vh.mT
    sizes = torch.diagonal(seen, dim1=-2, dim2=-1)
    assert sizes.min() > 0.6
    assert sizes.max() < 1.3
    torch.testing.assert_close(seen, torch.diag_embed(sizes), rtol=0, atol=1e-4)


def test_a_gradient_of_zero_moves_nothing() -> None:
    assert torch.equal(orthogonal(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_steps_are_those_of_torch() -> None:
    """``torch.optim.Muon`` with the same convention for the size of a step; it iterates in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(shape, generator=generator) for name, shape in (("a", (8, 24)), ("b", (24, 8)))}
    ours = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer = Optimizer(ours.items(), replace(MUON, gradient_clip=0.0), matrices=ours.keys())
    reference = torch.optim.Muon(
        theirs.values(), lr=0.01, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(4):
        for name in start:
            gradient = torch.randn(start[name].shape, generator=generator)
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        optimizer.step(0.01)
        reference.step()
    for name, value in start.items():
        moved, wanted = (p[name].detach() - value for p in (ours, theirs))
        assert (moved - wanted).norm() < 0.03 * wanted.norm()


def test_only_the_matrices_of_layers_are_orthogonalised(untied_folder: Path) -> None:
    policy = load_policy(untied_folder, dtype=torch.float32)
    matrices = layer_matrices(policy)
    assert len(matrices) == 2 * 7  # q, k, v, o, gate, up, down of two layers
    assert all("layers." in name and "norm" not in name for name in matrices)
    critic = load_critic(untied_folder, dtype=torch.float32)
    assert len(layer_matrices(critic)) == 2 * 7
    state = parts(Optimizer(critic.named_parameters(), MUON, matrices=layer_matrices(critic)).state())
    assert "head.weight.exp_avg" in state
    assert "backbone.embed_tokens.weight.exp_avg" in state
    assert "backbone.layers.0.mlp.up_proj.weight.momentum" in state
    assert "backbone.layers.0.mlp.up_proj.weight.exp_avg" not in state


def updated(
    rank: int, address: str, settings: LearnerSettings, batch: SequenceBatch
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """How far an update moved the actor's matrices, and its optimizer's state."""
    learner = Fsdp2().start(settings, rank, address, timeout_seconds=120)
    matrices = {n: p for n, p in learner.actor.module.named_parameters() if n in layer_matrices(learner.actor.module)}
    before = {name: full(p).clone() for name, p in matrices.items()}
    share = cut_for(batch, [range(len(batch))], ranks=settings.ranks, token_budget=60).shares[rank]
    learner.update(share, LossSettings())
    moved = {name: full(p) - before[name] for name, p in matrices.items()}
    return moved, whole(learner.actor.optimizer.state())


@pytest.mark.slow(stands_for="[{'ranks': 4, 'replicate': 2}]")
@pytest.mark.parametrize("layout", [{"ranks": 2}, {"ranks": 4}, {"ranks": 4, "replicate": 2}], ids=str)
def test_any_number_of_ranks_takes_the_same_step(
    layout: dict[str, Any], ranks: Any, make_batch: Callable[..., SequenceBatch], tied_folder: Path
) -> None:
    batch = make_batch(groups=6)
    settings = LearnerSettings(tied_folder, actor=MUON)
    moved, state = ranks.run(1, updated, settings, batch)[0]
    for others, their_state in ranks.run(layout["ranks"], updated, replace(settings, **layout), batch):
        for name, step in moved.items():
            # Directions that the gradient hardly has are blown up together with the rounding in them.
            assert (others[name] - step).norm() < 0.02 * step.norm(), name
        for name, tensor in state.items():
            torch.testing.assert_close(their_state[name], tensor, rtol=1e-3, atol=1e-5)
