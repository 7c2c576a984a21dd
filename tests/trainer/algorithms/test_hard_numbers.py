"""Numbers that rounding, half precision or a single wild sample could spoil: everything stays finite and right."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import oracle_advantages as oracle
import pytest
import torch
from ragged import Ragged, make_batch

from rljob_trainer.algorithms import (
    AdaptiveKl,
    AdvantageInputs,
    Correction,
    EntropyTarget,
    LossCounts,
    PolicyInputs,
    Segments,
    Weights,
    actor_loss,
    advantage_estimators,
    advantages,
    correct,
    critic_loss,
    kl_estimators,
    kl_penalised_rewards,
    policy_losses,
)
from rljob_trainer.algorithms.scan import discounted_sum

BASELINES = ["optimal_token_baseline", "tir_optimal_token_baseline"]


def confident(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of nearly certain tokens and their sums of squares, exactly, then rounded as a model's are."""
    rest = 10.0 ** (-3 - 6 * torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return torch.log1p(-rest).float(), ((1 - rest).square() + rest.square()).float()


@pytest.mark.parametrize("estimator", BASELINES)
def test_a_token_baseline_of_confident_tokens_lies_between_the_returns(estimator: str) -> None:
    """A weighted mean of returns 0 and 1: advantages are between -1 and 1, if no weight is negative."""
    lengths = [200] * 4
    for seed in range(20):
        log_probs, squares = confident(800, seed)
        inputs = AdvantageInputs(
            mask=torch.ones(800, dtype=torch.bool),
            segments=Segments.from_lengths(lengths),
            scores=torch.tensor([0.0, 1.0, 1.0, 0.0]),
            groups=torch.zeros(4, dtype=torch.int64),
            log_probs=log_probs,
            sum_squared_probs=squares,
        )
        assert float(advantages(estimator, inputs).advantages.abs().max()) <= 1.0


def test_a_token_baseline_of_confident_tokens_has_the_right_weights() -> None:
    """1 - 2 pi + sum pi^2 is (1 - pi)^2 and the squares of the others' probabilities, at most (1 - pi)^2 more: so is
    each weight known to a factor of two, and with it the baseline, even where float32 shows nothing of the bracket."""
    rest, scores = [1e-5, 1e-4, 3e-5], [0.0, 1.0, 0.5]
    inputs = AdvantageInputs(
        mask=torch.ones(3, dtype=torch.bool),
        segments=Segments.from_lengths([1, 1, 1]),
        scores=torch.tensor(scores),
        groups=torch.zeros(3, dtype=torch.int64),
        log_probs=torch.tensor([math.log1p(-r) for r in rest]),
        sum_squared_probs=torch.tensor([(1 - r) ** 2 + r**2 for r in rest]),
    )
    possible = [
        math.fsum(f * r * r * s for f, r, s in zip(factors, rest, scores, strict=True))
        / math.fsum(f * r * r for f, r in zip(factors, rest, strict=True))
        for factors in itertools.product((1, 2), repeat=3)
    ]
    baseline = torch.tensor(scores) - advantages("optimal_token_baseline", inputs).advantages
    assert min(possible) - 1e-6 <= float(baseline.min()) <= float(baseline.max()) <= max(possible) + 1e-6


@pytest.mark.parametrize("rest", [1e-3, 1e-4, 1e-5, 1e-6, 1.2e-7])
@pytest.mark.parametrize("estimator", BASELINES)
def test_a_group_whose_returns_are_alike_has_no_advantage_however_confident(estimator: str, rest: float) -> None:
    """A weighted mean of ones is 1, whatever the weights; 1.2e-7 is where float32 ends."""
    inputs = AdvantageInputs(
        mask=torch.ones(6, dtype=torch.bool),
        segments=Segments.from_lengths([3, 3]),
        scores=torch.ones(2),
        groups=torch.zeros(2, dtype=torch.int64),
        log_probs=torch.full((6,), math.log1p(-rest)),
        sum_squared_probs=torch.full((6,), (1 - rest) ** 2 + rest**2),
    )
    torch.testing.assert_close(advantages(estimator, inputs).advantages, torch.zeros(6), rtol=0, atol=1e-6)


@pytest.mark.parametrize("stream", ["log_probs", "sum_squared_probs", "weights"])
@pytest.mark.parametrize("estimator", BASELINES)
def test_a_token_baseline_names_the_sample_with_a_nan(estimator: str, stream: str) -> None:
    ones = torch.ones(5)
    inputs = AdvantageInputs(
        mask=torch.tensor([True, True, True, False, True]),
        segments=Segments.from_lengths([2, 3]),
        scores=torch.tensor([0.0, 1.0]),
        groups=torch.zeros(2, dtype=torch.int64),
        log_probs=-ones,
        sum_squared_probs=0.5 * ones,
        weights=ones,
    )
    masked, kept = torch.full((5,), 0.5), torch.full((5,), 0.5)
    masked[3], kept[4] = math.nan, math.nan
    assert bool(advantages(estimator, replace(inputs, **{stream: masked})).advantages.isfinite().all())
    with pytest.raises(ValueError, match=rf"the {stream} of sample 1 .*nan at its response token 2"):
        advantages(estimator, replace(inputs, **{stream: kept}))


@pytest.mark.parametrize("decay", [1.0, 0.97, 0.5])
@pytest.mark.parametrize("wild", [1e12, -1e30])
def test_a_huge_reward_stays_in_its_own_sequence(decay: float, wild: float) -> None:
    """Whatever a neighbour's rewards are, sums are those of the sequence alone, to the last bit."""
    lengths = [3, 1, 16, 0, 40, 5, 16, 700, 2, 15, 33, 1, 1]
    segments, total = Segments.from_lengths(lengths), sum(lengths)
    random = torch.Generator().manual_seed(3)
    stream = torch.randn(total, generator=random, dtype=torch.float64)
    mask = torch.rand(total, generator=random) > 0.1
    quiet = discounted_sum(stream, decay, segments, mask)
    for row in range(len(lengths)):
        here = torch.zeros(total, dtype=torch.bool)
        here[int(segments.offsets[row]) : int(segments.offsets[row + 1])] = True
        loud = discounted_sum(torch.where(here, wild, stream), decay, segments, mask)
        assert torch.equal(loud[~here], quiet[~here])


def test_a_huge_reward_or_weight_leaves_other_samples_advantages_alone() -> None:
    batch = make_batch([2, 2], [30, 20, 25, 40], 0.1, seed=5)
    inputs = AdvantageInputs(
        mask=batch.mask,
        segments=batch.segments,
        scores=batch.vector("scores", torch.float64),
        groups=torch.tensor(batch.groups),
        values=batch.stream("values", torch.float64),
        log_probs=batch.stream("old", torch.float64),
        sum_squared_probs=batch.stream("squares", torch.float64),
        weights=batch.stream("weights", torch.float64),
    )
    first = torch.arange(4) < 2  # the other group's samples
    spread = batch.segments.spread(first)
    wild = replace(
        inputs,
        scores=torch.where(first, inputs.scores, 1e12),  # type: ignore[arg-type]
        weights=torch.where(spread, inputs.weights, 1e9),  # type: ignore[arg-type]
    )
    for name, settings in {"gae": {"whiten": False}, **{name: {} for name in BASELINES}}.items():
        calm, loud = (advantages(name, given, **settings).advantages for given in (inputs, wild))
        assert torch.equal(calm[spread], loud[spread])


def test_the_adaptive_factor_keeps_its_sign_and_nan_is_no_measurement() -> None:
    """A batch ten times the horizon counts as one horizon: factors 1.2 and 0.8."""
    controller = AdaptiveKl(0.1, target=0.1, horizon=100)
    controller.update(kl=0.0, sequences=1000)
    assert controller.coefficient == pytest.approx(0.08)
    controller.update(kl=5.0, sequences=1000)
    assert controller.coefficient == pytest.approx(0.096)
    for kl in (math.nan, math.inf, -math.inf):
        controller.update(kl=kl, sequences=10)
    assert controller.coefficient == pytest.approx(0.096)
    entropy = EntropyTarget(target=1.0, coefficient=0.01)
    for measured in (math.nan, math.inf, -math.inf):
        entropy.update(measured)
    assert entropy.coefficient == 0.01


@pytest.mark.parametrize("log_prob", [1e-7, 1e-3])
def test_dppo_kl_takes_a_log_prob_above_0_for_0(log_prob: float) -> None:
    """Of such a token nothing is known but that it is certain: its loss is that of probability 1."""
    streams = {"mask": torch.ones(2, dtype=torch.bool), "segments": Segments.from_lengths([2])}
    results = []
    for certain in (log_prob, 0.0):
        for new, old in ((certain, -1e-4), (-1e-4, certain)):
            log_probs = torch.tensor([new, new], requires_grad=True)
            given = PolicyInputs(
                log_probs=log_probs,
                old_log_probs=torch.tensor([old, old]),
                advantages=torch.tensor([1.0, -1.0]),
                **streams,  # type: ignore[arg-type]
            )
            output = policy_losses["dppoKl"](given)
            output.per_token.sum().backward()
            assert log_probs.grad is not None
            assert bool(output.per_token.isfinite().all())
            results.append((log_probs.grad, float(output.metrics["clip_fraction"])))
    for (slope, clipped), (expected, same) in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(slope, expected, rtol=2e-3, atol=1e-6)
        assert clipped == same


def test_perplexity_is_finite_at_any_log_prob_and_exact_where_float64_reaches() -> None:
    """exp(10,000) is no float64; exp(500) is."""
    mask, segments = torch.ones(2, dtype=torch.bool), Segments.from_lengths([1, 1])
    wild = correct(torch.tensor([-1e4, -1e4]), torch.tensor([-1.0, -2e4]), mask, segments, Correction()).metrics
    assert all(math.isfinite(value) for value in wild.values())
    assert wild["rollout_correction/log_perplexity/training"] == 1e4
    deep = correct(torch.tensor([-500.0, -500.0]), torch.tensor([-1.0, -1.0]), mask, segments, Correction()).metrics
    assert deep["rollout_correction/perplexity/training"] == pytest.approx(math.exp(500))


# --- half precision

NAMES = ["values", "rewards", "old", "rollout", "reference", "log_probs", "advantages", "weights", "squares"]


def halved() -> Ragged:
    """A batch whose numbers are bfloat16's, so that what comes in half precision is the same as in float64."""
    batch = make_batch([3, 3], [9, 4, 7, 0, 12, 5], 0.2, seed=8)
    for name, rows in batch.rows.items():
        batch.rows[name] = [torch.tensor(row).bfloat16().double().tolist() for row in rows]
    for name, values in batch.scalars.items():
        batch.scalars[name] = torch.tensor(values).bfloat16().double().tolist()
    return batch


HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def advantage_inputs(batch: Ragged, dtype: torch.dtype) -> AdvantageInputs:
    return AdvantageInputs(
        mask=batch.mask,
        segments=batch.segments,
        scores=batch.vector("wins", dtype),
        groups=torch.tensor(batch.groups),
        values=batch.stream("values", dtype),
        final_values=batch.vector("final_values", dtype),
        truncated=batch.vector("truncated", torch.float32).bool(),
        greedy_scores=batch.vector("greedy", dtype),
        parts=torch.stack([batch.vector("part_a", dtype), batch.vector("part_b", dtype)], 1),
        log_probs=batch.stream("old", dtype),
        sum_squared_probs=batch.stream("squares", dtype),
        weights=batch.stream("weights", dtype),
    )


def near(actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert actual is not None
    assert expected is not None
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


@HALVES
@pytest.mark.parametrize("name", advantage_estimators)
def test_estimators_of_half_precision_streams_compute_in_float32(name: str, half: torch.dtype) -> None:
    batch = halved()
    result = advantages(name, advantage_inputs(batch, half))
    exact = advantages(name, advantage_inputs(batch, torch.float64))
    near(result.advantages, exact.advantages)
    if exact.returns is not None:
        near(result.returns, exact.returns)


def policy_inputs(batch: Ragged, dtype: torch.dtype) -> PolicyInputs:
    selection = torch.arange(len(batch.mask)) % 3 == 0
    streams = {name: batch.stream(name, dtype) for name in ("log_probs", "advantages", "weights", "entropy")}
    return PolicyInputs(
        **{**streams, "log_probs": streams["log_probs"].requires_grad_()},
        mask=batch.mask,
        segments=batch.segments,
        old_log_probs=batch.stream("old", dtype),
        rollout_log_probs=batch.stream("rollout", dtype),
        ref_log_probs=batch.stream("reference", dtype),
        selection=selection,
    )


def settings(**given: Any) -> Any:
    usual: dict[str, Any] = {
        "policy_loss": "ppoClip",
        "policy_loss_params": {},
        "aggregation": "seqMeanTokenMean",
        "aggregation_params": {},
        "kl_kind": None,
        "kl_coefficient": 0.1,
        "entropy_coefficient": 0.01,
        "value_clip": 0.2,
        "correction": None,
    }
    return SimpleNamespace(**usual | given)


@HALVES
@pytest.mark.parametrize("name", policy_losses)
def test_losses_of_half_precision_streams_compute_in_float32(name: str, half: torch.dtype) -> None:
    batch = halved()
    chosen, counts = settings(policy_loss=name, kl_kind="k3"), LossCounts.of(batch.mask, batch.segments)
    losses, slopes = [], []
    for dtype in (half, torch.float64):
        given = policy_inputs(batch, dtype)
        result = actor_loss(given, chosen, counts)
        result.loss.backward()
        assert given.log_probs.grad is not None
        losses.append(result.loss)
        slopes.append(given.log_probs.grad.double())
    near(losses[0], losses[1])
    torch.testing.assert_close(slopes[0], slopes[1], rtol=2e-2, atol=1e-3)  # rounded once, as the parameters' are


@HALVES
@pytest.mark.parametrize("kind", kl_estimators)
def test_a_kl_penalty_of_half_precision_streams_computes_in_float32(kind: str, half: torch.dtype) -> None:
    batch = halved()
    results = [
        kl_penalised_rewards(
            batch.vector("scores", dtype),
            batch.stream("old", dtype),
            batch.stream("reference", dtype),
            batch.mask,
            batch.segments,
            kind=kind,
            coefficient=0.1,
        )
        for dtype in (half, torch.float64)
    ]
    for actual, expected in zip(*results, strict=True):
        near(actual, expected)


@HALVES
def test_the_value_loss_and_the_correction_of_half_precision_streams_compute_in_float32(half: torch.dtype) -> None:
    batch, found = halved(), []
    counts = LossCounts.of(batch.mask, batch.segments)
    for dtype in (half, torch.float64):
        values, returns, old = (batch.stream(name, dtype) for name in ("values", "returns", "old_values"))
        loss = critic_loss(values, returns, batch.mask, batch.segments, settings(), counts, old).loss
        correction = Correction(Weights("sequence", 2.0, normalize=True))
        corrected = correct(
            batch.stream("old", dtype), batch.stream("rollout", dtype), batch.mask, batch.segments, correction
        )
        found.append((loss, corrected.weights))
    near(found[0][0], found[1][0])
    near(found[0][1], found[1][1])


# --- whitened rewards


def test_whitened_rewards_keep_their_mean_and_have_variance_1() -> None:
    """(r - mean) / std + mean, as in arXiv 1909.08593's code, and GAE of them."""
    batch = make_batch([2, 2], [6, 3, 0, 8], 0.2, seed=4)
    flat = [v for row in batch.kept("rewards") for v in row]
    centre = oracle.mean(flat)
    scaled = [[v + centre for v in row] for row in oracle.whiten(batch.kept("rewards"))]
    expected, _ = oracle.gae(scaled, batch.kept("values"), [0.0] * 4, 0.99, 0.9)
    inputs = AdvantageInputs(
        mask=batch.mask,
        segments=batch.segments,
        rewards=batch.stream("rewards", torch.float64),
        values=batch.stream("values", torch.float64),
    )
    result = advantages("gae", inputs, gamma=0.99, lambda_=0.9, whiten=False, whiten_rewards=True).advantages
    wanted = torch.tensor([v for row in expected for v in row], dtype=torch.float64)
    torch.testing.assert_close(result[batch.mask], wanted)
    assert result[~batch.mask].tolist() == [0.0] * int((~batch.mask).sum())
