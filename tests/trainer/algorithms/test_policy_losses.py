"""Every policy loss against its oracle: values on extreme batches, gradients against finite differences of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import oracle_losses as oracle
import pytest
import torch
from differences import finite_differences, same_slopes
from hypothesis import given, settings
from oracle_losses import Sequence
from ragged import PRECISIONS, Ragged, Rows, agree, batches

from rljob_trainer.algorithms import LossCounts, PolicyInputs, Segments, aggregate, policy_losses

Oracle = Callable[..., list[float]]
CASES: dict[str, tuple[str, Oracle, dict[str, Any]]] = {
    "ppoClip": ("ppoClip", oracle.ppo, {"clip_low": 0.2, "clip_high": 0.28}),
    "ppoClip, dual clip": ("ppoClip", oracle.ppo, {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.5}),
    "ppoClip, dual clip off": ("ppoClip", oracle.ppo, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0}),
    "bypassPpoClip": ("bypassPpoClip", oracle.bypass_ppo, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
    "gspo": ("gspo", oracle.gspo, {"clip_low": 0.02, "clip_high": 0.03}),
    "gmpo": ("gmpo", oracle.gmpo, {"clip_low": 0.2, "clip_high": 0.3}),
    "sapo": ("sapo", oracle.sapo, {"tau_positive": 1.0, "tau_negative": 1.05}),
    "reinforce": ("reinforce", oracle.policy_gradient, {}),
    "gpg": ("gpg", oracle.policy_gradient, {}),
    "cispo": ("cispo", oracle.cispo, {"clip_low": 0.3, "clip_high": 0.4}),
    "tis": ("tis", oracle.tis, {"ratio_cap": 1.2}),
    "dppoTv": ("dppoTv", oracle.dppo_tv, {"clip_low": 0.05, "clip_high": 0.1, "ratio_cap": 1.5}),
    "dppoKl": ("dppoKl", oracle.dppo_kl, {"divergence_low": 0.01, "divergence_high": 0.02, "ratio_cap": 1.5}),
    "dro": ("dro", oracle.dro, {"beta": 0.3}),
    "clipCov": ("clipCov", oracle.clip_cov, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
    "klCov": ("klCov", oracle.kl_cov, {"kl_coefficient": 0.1}),
    "bypassReinforce, token": (
        "bypassReinforce",
        oracle.bypass_reinforce,
        {"level": "token", "low": None, "high": 1.2},
    ),
    "bypassReinforce, icepop": (
        "bypassReinforce",
        oracle.bypass_reinforce,
        {"level": "token", "low": 0.8, "high": 1.3},
    ),
    "bypassReinforce, clamped": (
        "bypassReinforce",
        oracle.bypass_reinforce,
        {"level": "token", "low": 0.8, "high": 1.3, "clamp": True},
    ),
    "bypassReinforce, sequence": (
        "bypassReinforce",
        oracle.bypass_reinforce,
        {"level": "sequence", "low": None, "high": 2.0},
    ),
    "bypassReinforce, none": ("bypassReinforce", oracle.bypass_reinforce, {"level": "none", "low": None, "high": 2.0}),
}


def selection(batch: Ragged) -> list[list[bool]]:
    """Any selection will do here: every third kept token."""
    count, chosen = 0, []
    for row in batch.kept("advantages"):
        chosen.append([(count + t) % 3 == 0 for t in range(len(row))])
        count += len(row)
    return chosen


def inputs(batch: Ragged, dtype: torch.dtype, log_probs: torch.Tensor | None = None) -> PolicyInputs:
    chosen = torch.ones(batch.mask.shape, dtype=torch.bool)  # True where masked: must not matter
    chosen[batch.mask] = torch.tensor([c for row in selection(batch) for c in row], dtype=torch.bool)
    return PolicyInputs(
        log_probs=batch.stream("log_probs", dtype) if log_probs is None else log_probs,
        old_log_probs=batch.stream("old", dtype),
        rollout_log_probs=batch.stream("rollout", dtype),
        advantages=batch.stream("advantages", dtype),
        mask=batch.mask,
        segments=batch.segments,
        selection=chosen,
    )


def sequences(batch: Ragged, log_probs: Rows | None = None) -> list[Sequence]:
    frozen = batch.kept("log_probs")
    return [
        Sequence(*streams)
        for streams in zip(
            frozen if log_probs is None else log_probs,
            frozen,
            batch.kept("old"),
            batch.kept("advantages"),
            batch.kept("rollout"),
            selection(batch),
            strict=True,
        )
    ]


@pytest.mark.parametrize("dtype", PRECISIONS, ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=15)
@given(batch=batches())
def test_value(dtype: torch.dtype, case: str, batch: Ragged) -> None:
    name, of_sequence, params = CASES[case]
    expected = [of_sequence(s, **params) for s in sequences(batch)]
    agree(f"loss {case}", policy_losses[name](inputs(batch, dtype), **params).per_token, batch, expected)


@pytest.mark.parametrize("aggregation", ["tokenMean", "seqMeanTokenMean"])
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=4)
@given(batch=batches(extreme=False, longest=6))
def test_gradient(case: str, aggregation: str, batch: Ragged) -> None:
    name, of_sequence, params = CASES[case]
    expected = finite_differences(
        batch.kept("log_probs"),
        lambda rows: oracle.aggregate([of_sequence(s, **params) for s in sequences(batch, rows)], aggregation),
    )
    log_probs = batch.stream("log_probs", torch.float64).requires_grad_()
    per_token = policy_losses[name](inputs(batch, torch.float64, log_probs), **params).per_token
    counts = LossCounts.of(batch.mask, batch.segments)
    loss = aggregate(aggregation, per_token, batch.segments, batch.mask, counts)
    if not loss.requires_grad:
        assert not any(batch.mask.tolist())
        return
    loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad[~batch.mask].tolist() == [0.0] * int((~batch.mask).sum())
    same_slopes(f"gradient {case}", log_probs.grad[batch.mask], expected)


@pytest.mark.parametrize("case", CASES)
@given(batch=batches())
@settings(max_examples=10)
def test_a_gradient_is_finite_and_0_where_masked_whatever_the_batch(case: str, batch: Ragged) -> None:
    name, _, params = CASES[case]
    log_probs = batch.stream("log_probs", torch.float32).requires_grad_()
    policy_losses[name](inputs(batch, torch.float32, log_probs), **params).per_token.sum().backward()
    gradient = torch.zeros(0) if log_probs.grad is None else log_probs.grad
    assert bool(gradient.isfinite().all())
    assert bool((gradient[~batch.mask] == 0).all() if gradient.numel() else True)


@pytest.mark.parametrize("name", [n for n in policy_losses if n not in ("clipCov", "klCov")])
@given(batch=batches(extreme=False))
@settings(max_examples=8)
def test_cutting_the_batch_between_sequences_changes_nothing(name: str, batch: Ragged) -> None:
    whole = policy_losses[name](inputs(batch, torch.float64)).per_token
    cut = len(batch.lengths) // 2
    parts = [batch.reordered(list(range(cut))), batch.reordered(list(range(cut, len(batch.lengths))))]
    pieces = [policy_losses[name](inputs(part, torch.float64)).per_token for part in parts]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-12, atol=1e-12)


def test_metrics_count_what_was_clipped() -> None:
    """Ratios 2, 0.5, 1, 8 and advantages 1, -1, 1, -1: the first two are clipped, the dual clip catches the last."""
    batch_inputs = PolicyInputs(
        log_probs=torch.tensor([2.0, 0.5, 1.0, 8.0, math.nan]).log() - 3,
        old_log_probs=torch.full((5,), -3.0),
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, math.nan]),
        mask=torch.tensor([True, True, True, True, False]),
        segments=Segments.from_lengths([5]),
    )
    output = policy_losses["ppoClip"](batch_inputs, dual_clip=3.0)
    torch.testing.assert_close(output.per_token, torch.tensor([-1.2, 0.8, -1.0, 3.0, 0.0]))
    assert float(output.metrics["clip_fraction"]) == 2
    assert float(output.metrics["clip_fraction_low"]) == 1
    assert float(output.metrics["dual_clip_fraction"]) == 1
    assert float(output.metrics["ratio/mean"]) == pytest.approx(2 + 0.5 + 1 + 8, rel=1e-6)
    assert float(output.metrics["approx_kl"]) == pytest.approx(-math.log(8), rel=1e-6)


RATIOS = {
    # Of gmpo log 2 is above 0.4, log 0.5 below -0.4, log 1.1 within.
    "gmpo": ([2.0, 0.5, 1.1, 1.0], [1.0, -1.0, 1.0, -1.0], {"clip_fraction": 2, "clip_fraction_low": 1}),
    # pi_old is 0.1: pi moves by 0.5 (left out), by 0.15 (kept, its ratio cut at 2), by -0.09 (left out), by 0.5 (kept:
    # the advantage pulls it back, ratio cut).
    "dppoTv": (
        [6.0, 2.5, 0.1, 6.0],
        [1.0, 1.0, -1.0, -1.0],
        {"clip_fraction": 2, "clip_fraction_low": 1, "cap_fraction": 2},
    ),
    # KL(0.1 || 0.6) is 0.55, (0.1 || 0.25) 0.07, (0.1 || 0.01) 0.14 nats.
    "dppoKl": (
        [6.0, 2.5, 0.1, 6.0],
        [1.0, 1.0, -1.0, -1.0],
        {"clip_fraction": 2, "clip_fraction_low": 1, "cap_fraction": 2},
    ),
    "klCov": ([2.0, 0.5, 1.0, 1.0], [1.0, -1.0, 1.0, -1.0], {"selected_fraction": 2, "absolute_kl": 2 * math.log(2)}),
}
SETTINGS: dict[str, dict[str, float]] = {
    "dppoTv": {"clip_low": 0.08, "ratio_cap": 2.0},
    "dppoKl": {"divergence_low": 0.1, "divergence_high": 0.3, "ratio_cap": 2.0},
}


@pytest.mark.parametrize("name", RATIOS)
def test_metrics_count_what_other_losses_hold_back(name: str) -> None:
    ratios, advantages, expected = RATIOS[name]
    old = torch.full((5,), math.log(0.1))
    output = policy_losses[name](
        PolicyInputs(
            log_probs=old + torch.tensor([*ratios, math.nan]).log(),
            old_log_probs=old,
            advantages=torch.tensor([*advantages, math.nan]),
            mask=torch.tensor([True, True, True, True, False]),
            segments=Segments.from_lengths([5]),
            selection=torch.tensor([True, True, False, False, True]),
        ),
        **SETTINGS.get(name, {}),
    )
    counted = {key: float(value) for key, value in output.metrics.items() if key in expected}
    assert counted == pytest.approx(expected, rel=1e-6)
