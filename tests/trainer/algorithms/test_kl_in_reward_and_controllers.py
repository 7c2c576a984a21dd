"""The KL in the reward, and the coefficients that follow a measurement."""

from __future__ import annotations

import oracle_advantages
import oracle_losses as oracle
import pytest
import torch
from hypothesis import given, settings
from ragged import PRECISIONS, Ragged, agree, batches, near

from rljob_trainer.algorithms import AdaptiveKl, EntropyTarget, FixedKl, Segments, kl_penalised_rewards


@pytest.mark.parametrize("dtype", PRECISIONS, ids=["float64", "float32"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
@settings(max_examples=15)
@given(batch=batches())
def test_rewards_pay_for_the_kl_token_by_token(dtype: torch.dtype, kind: str, batch: Ragged) -> None:
    rows = [
        [oracle.kl(kind, x, r) for x, r in zip(a, b, strict=True)]
        for a, b in zip(batch.kept("old"), batch.kept("reference"), strict=True)
    ]
    placed = oracle_advantages.token_rewards(batch.scalars["scores"], [len(row) for row in rows])
    expected = [[s - 0.1 * k for s, k in zip(a, b, strict=True)] for a, b in zip(placed, rows, strict=True)]
    rewards, mean = kl_penalised_rewards(
        batch.vector("scores", dtype),
        batch.stream("old", dtype),
        batch.stream("reference", dtype),
        batch.mask,
        batch.segments,
        kind=kind,
        coefficient=0.1,
    )
    agree(f"kl in reward {kind}", rewards, batch, expected)
    near("kl in reward (mean)", mean, oracle.aggregate(rows, "seqMeanTokenMean"))


def test_rewards_pay_for_the_exact_kl_where_it_is_given() -> None:
    nan = float("nan")
    log_probs, exact = torch.zeros(4), torch.tensor([0.5, nan, 0.25, 1.0])
    mask, segments = torch.tensor([True, False, True, True]), Segments.from_lengths([3, 1])
    scores, coefficient = torch.tensor([2.0, -1.0]), 0.1
    rewards, mean = kl_penalised_rewards(
        scores, log_probs, log_probs, mask, segments, kind="full", coefficient=coefficient, vocabulary_kl=exact
    )
    torch.testing.assert_close(rewards[mask], torch.tensor([-0.05, 2.0 - 0.025, -1.0 - 0.1]))
    assert mean.item() == pytest.approx((0.375 + 1.0) / 2)
    with pytest.raises(ValueError, match="full needs `vocabulary_kl`"):
        kl_penalised_rewards(scores, log_probs, log_probs, mask, segments, kind="full", coefficient=coefficient)


def test_the_adaptive_controller_follows_its_equation() -> None:
    """arXiv 1909.08593: beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)."""
    controller = AdaptiveKl(0.5, target=0.1, horizon=1000)
    controller.update(kl=0.11, sequences=100)  # error 0.1
    assert controller.coefficient == pytest.approx(0.5 * 1.01)
    controller.update(kl=5.0, sequences=500)  # clipped to 0.2
    assert controller.coefficient == pytest.approx(0.5 * 1.01 * 1.1)
    controller.update(kl=0.0, sequences=500)  # clipped to -0.2
    assert controller.coefficient == pytest.approx(0.5 * 1.01 * 1.1 * 0.9)
    resumed = AdaptiveKl(0.5, target=0.1, horizon=1000)
    resumed.load_state_dict(controller.state_dict())
    assert resumed == controller
    with pytest.raises(ValueError, match="above 0"):
        AdaptiveKl(0.5, target=0.0)


def test_the_fixed_controller_stays() -> None:
    controller = FixedKl(0.5)
    controller.update(kl=100.0, sequences=1)
    other = FixedKl()
    other.load_state_dict(controller.state_dict())
    assert other.coefficient == controller.coefficient == 0.5


def test_the_entropy_bonus_rises_below_the_target_fades_above_and_stays_in_its_bounds() -> None:
    controller = EntropyTarget(target=1.0, coefficient=0.01, rate=0.02, maximum=0.05)
    controller.update(entropy=0.5)
    assert controller.coefficient == pytest.approx(0.02)
    controller.update(entropy=1.25)
    assert controller.coefficient == pytest.approx(0.015)
    for _ in range(10):
        controller.update(entropy=0.0)
    assert controller.coefficient == 0.05
    resumed = EntropyTarget(target=1.0, rate=0.02, maximum=0.05)
    resumed.load_state_dict(controller.state_dict())
    assert resumed == controller
    for _ in range(10):
        controller.update(entropy=3.0)
    assert controller.coefficient == 0.0
    with pytest.raises(ValueError, match="entropy coefficient must be between"):
        EntropyTarget(target=1.0, coefficient=1.0)


@pytest.mark.parametrize(("model", "other"), [("policy", "reference"), ("reference", "policy")])
def test_a_kl_that_is_no_number_is_the_models_fault_and_not_the_rewards(model: str, other: str) -> None:
    streams = {"policy": torch.full((4,), -1.0), "reference": torch.full((4,), -1.0)}
    streams[model][3] = torch.nan
    segments, mask = Segments.from_lengths([1, 3]), torch.ones(4, dtype=torch.bool)
    rewarded = (torch.ones(2), streams["policy"], streams["reference"])
    with pytest.raises(
        ValueError, match=f"the KL of sample 1 of this batch: nan at its response token 2.*the {model} that"
    ):
        kl_penalised_rewards(*rewarded, mask, segments, coefficient=0.1)
    mask[3] = False  # what is masked cannot matter
    rewards, _ = kl_penalised_rewards(*rewarded, mask, segments, coefficient=0.1)
    assert rewards.isfinite().all()
