"""Two lanes: how jobs are spread, and what a twin shares with its original."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from cut_for import cut_for
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_trainer.learner.cpu.lanes import Twin, assign, halved_from
from rljob_trainer.learner.cpu.plain_layer import compute_in_rows
from rljob_trainer.learner.models import PackedRow, checkpoint_activations, load_policy
from rljob_trainer.learner.packing import build_row
from rljob_trainer.learner.prefixes import Lengths
from rljob_trainer.learner.protocol import SequenceBatch

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_every_job_once_and_no_lane_much_longer_than_it_must_be(costs: list[int], lanes: int) -> None:
    assigned = assign(costs, lanes)
    assert sorted(job for lane in assigned for job in lane) == list(range(len(costs)))
    assert all(lane == sorted(lane) for lane in assigned)
    assert assigned == assign(costs, lanes)
    best = min(
        max(sum(cost for cost, at in zip(costs, places, strict=True) if at == lane) for lane in range(lanes))
        for places in product(range(lanes), repeat=len(costs))
    )
    # Graham 1969: the longest first is within 4/3 - 1/(3 lanes) of the best.
    assert max(sum(costs[job] for job in lane) for lane in assigned) <= best * (4 - 1 / lanes) / 3 + 1e-9


def test_an_actor_and_a_critic_have_a_lane_each_and_halves_are_shared_out() -> None:
    assert assign([10, 8], 2) == [[0], [1]]
    critic, actor = [8.0, 8.1], [12.0, 12.2]
    lanes = assign([*critic, *actor], 2)
    assert sorted(lanes) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("folder", ["tied_folder", "untied_folder", "gemma_folder"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_twin_has_the_same_parameters_and_gradients_of_its_own(
    folder: str, recomputed: bool, make_batch: Callable[..., SequenceBatch], request: pytest.FixtureRequest
) -> None:
    policy = load_policy(request.getfixturevalue(folder), dtype=torch.float32)
    compute_in_rows(policy.layers)
    if recomputed:
        checkpoint_activations(policy.layers)
    batch = make_batch()
    lengths = Lengths.of(batch)
    everything = np.arange(len(batch))

    def backward(module: torch.nn.Module, indices: np.ndarray) -> None:
        row = build_row(lengths, indices)
        packed = PackedRow.of(row, batch.token_ids, CPU, torch.float32, outputs_only=True)
        module(packed, 1.0).log_probs.sum().backward()

    def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    twin = Twin(policy)
    for parameter in policy.parameters():
        parameter.data = parameter.data * 1.1  # elsewhere, and other values
    twin.follow()
    places = {name: p.data_ptr() for name, p in policy.named_parameters()}
    assert {name: p.data_ptr() for name, p in twin.module.named_parameters()} == places

    backward(policy, everything)
    expected = gradients(policy)
    policy.zero_grad()
    backward(policy, everything[:9])
    before = gradients(policy)
    backward(twin.module, everything[9:])
    assert all(torch.equal(before[name], value) for name, value in gradients(policy).items())
    twin.hand_over()
    assert not gradients(twin.module)
    for name, value in gradients(policy).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_large_mini_batches_are_halved(make_batch: Callable[..., SequenceBatch], tied_folder: Path) -> None:
    from rljob_trainer.learner.settings import LearnerSettings, OptimizerSettings

    batch = make_batch()
    tokens = Lengths.of(batch).row_tokens(np.arange(len(batch)))

    def pieces(limit: int | None) -> list[int]:
        share = cut_for(batch, [range(len(batch))], ranks=1, token_budget=1 << 20, halved_from=limit).shares[0]
        return [Lengths.of(batch).row_tokens(micro) for micro in share.micro_batches[0]]

    assert len(pieces(None)) == len(pieces(tokens + 1)) == 1
    halves = pieces(tokens)
    assert len(halves) == 2
    assert max(halves) < 0.65 * tokens

    alone = LearnerSettings(tied_folder)
    with_critic = LearnerSettings(tied_folder, critic=OptimizerSettings())
    assert halved_from(alone) is not None
    assert halved_from(with_critic) is not None
    assert halved_from(alone) < halved_from(with_critic)
    assert halved_from(LearnerSettings(tied_folder, ranks=2)) is None
    assert halved_from(LearnerSettings(tied_folder, dtype="bfloat16")) is None
