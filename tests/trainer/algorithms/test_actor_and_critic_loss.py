"""The losses as the learner calls them: every term, every aggregation, and sums over micro-batches and ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import oracle_correction
import oracle_losses as oracle
import pytest
import torch
from differences import finite_differences, same_slopes
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_losses import Sequence
from ragged import PRECISIONS, Ragged, Rows, batches, make_batch, near

from rljob_trainer.algorithms import (
    Correction,
    Loss,
    LossCounts,
    PolicyInputs,
    Rejection,
    Segments,
    Weights,
    actor_loss,
    aggregate,
    aggregations,
    critic_loss,
    kl_estimators,
    policy_losses,
    rollout_share,
)
from rljob_trainer.learner.protocol import LossSettings

PRECISION = pytest.mark.parametrize("dtype", PRECISIONS, ids=["float64", "float32"])
SCALED = {"seqMeanTokenSumNorm": {"scale": 7.0}}


def inputs(batch: Ragged, dtype: torch.dtype, **more: Any) -> PolicyInputs:
    streams: dict[str, Any] = {
        "log_probs": batch.stream("log_probs", dtype),
        "old_log_probs": batch.stream("old", dtype),
        "rollout_log_probs": batch.stream("rollout", dtype),
        "ref_log_probs": batch.stream("reference", dtype),
        "advantages": batch.stream("advantages", dtype),
        "entropy": batch.stream("entropy", dtype),
        "weights": batch.stream("weights", dtype),
        "mask": batch.mask,
        "segments": batch.segments,
    }
    return PolicyInputs(**(streams | more))


@PRECISION
@pytest.mark.parametrize("kind", aggregations)
@given(batch=batches())
def test_aggregation(dtype: torch.dtype, kind: str, batch: Ragged) -> None:
    segments = batch.segments_for(kind, dtype)
    counts = LossCounts.of(batch.mask, segments)
    result = aggregate(kind, batch.stream("per_token", dtype), segments, batch.mask, counts, **SCALED.get(kind, {}))
    near(f"aggregation {kind}", result, oracle.aggregate(batch.kept("per_token"), kind, 7.0, batch.groups))


@PRECISION
@pytest.mark.parametrize("kind", aggregations)
@settings(max_examples=15)
@given(batch=batches())
def test_the_actor_loss_is_the_sum_of_its_terms(dtype: torch.dtype, kind: str, batch: Ragged) -> None:
    chosen = LossSettings(
        policy_loss="ppoClip",
        policy_loss_params={"clip_high": 0.28, "dual_clip": 3.0},
        aggregation=kind,
        aggregation_params=SCALED.get(kind, {}),
        kl_kind="k3",
        kl_coefficient=0.05,
        entropy_coefficient=0.01,
    )
    kept = [batch.kept(name) for name in ("log_probs", "old", "advantages", "weights", "reference", "entropy")]
    policy, kl = [], []
    for lp, old, adv, w, ref, _ in zip(*kept, strict=True):
        policy.append([x * y for x, y in zip(oracle.ppo(Sequence(lp, lp, old, adv), 0.2, 0.28, 3.0), w, strict=True)])
        kl.append([oracle.kl("k3", x, y) for x, y in zip(lp, ref, strict=True)])
    expected = (
        oracle.aggregate(policy, kind, 7.0, batch.groups)
        + 0.05 * oracle.aggregate(kl, kind, 7.0, batch.groups)
        - 0.01 * oracle.aggregate(kept[5], kind, 7.0, batch.groups)
    )
    segments = batch.segments_for(kind, dtype)
    result = actor_loss(inputs(batch, dtype, segments=segments), chosen, LossCounts.of(batch.mask, segments))
    near("actor loss", result.loss, expected)
    near("actor loss (policy)", result.metrics["actor/policy_loss"], oracle.aggregate(policy, kind, 7.0, batch.groups))
    near("actor loss (entropy)", result.metrics["actor/entropy"], oracle.aggregate(kept[5], "tokenMean"))
    near("actor loss (kl)", result.metrics["kl/in_loss"], oracle.aggregate(kl, "tokenMean"))
    assert not any(value.requires_grad for value in result.metrics.values())


@PRECISION
@settings(max_examples=15)
@given(batch=batches(), ages=st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_an_interpolated_anchor_is_made_and_corrected_in_the_loss(
    dtype: torch.dtype, batch: Ragged, ages: list[int]
) -> None:
    """arXiv 2512.06547: log pi_old = alpha log pi_roll + (1 - alpha) log pi_theta, alpha = 1 / age (0 for age 0);
    min(pi_old / pi_roll, 2) times PPO's loss of pi_theta / pi_old, both constants for the gradient."""
    age = [[ages[(i + t) % 3] for t in range(length)] for i, length in enumerate(batch.lengths)]
    kept = [[a for a, k in zip(row, keep, strict=True) if k] for row, keep in zip(age, batch.keep, strict=True)]
    old, rollout = [], batch.kept("rollout")
    for row, own, roll in zip(kept, batch.kept("log_probs"), rollout, strict=True):
        share = [1 / a if a else 0.0 for a in row]
        old.append([s * r + (1 - s) * x for s, r, x in zip(share, roll, own, strict=True)])
    weights = oracle_correction.weights(oracle_correction.log_ratios(old, rollout), "token", None, 2.0, False)
    policy = [
        [x * y for x, y in zip(oracle.ppo(Sequence(lp, lp, anchor, adv), 0.2, 0.28), w, strict=True)]
        for lp, anchor, adv, w in zip(batch.kept("log_probs"), old, batch.kept("advantages"), weights, strict=True)
    ]
    plain = LossSettings(policy_loss_params={"clip_high": 0.28})
    counts = LossCounts.of(batch.mask, batch.segments)
    share = rollout_share(torch.tensor([a for row in age for a in row]))
    given_ = inputs(batch, dtype, old_log_probs=None, weights=None, rollout_share=share)
    own = given_.log_probs.requires_grad_()
    result = actor_loss(given_, replace(plain, correction=Correction(Weights("token", 2.0))), counts)
    near("interpolated anchor", result.loss, oracle.aggregate(policy, "tokenMean"))
    near("interpolated anchor (weights)", result.metrics["actor/correction_weight"],
         oracle.aggregate(weights, "tokenMean"))  # fmt: skip
    assert result.metrics["actor/rejected_fraction"] == 0

    # The same anchor and weights given as streams, which other tests hold against finite differences.
    flat = torch.full_like(batch.stream("old", dtype), torch.nan)
    streams = []
    for rows in (old, weights):
        streams.append(flat.clone())
        streams[-1][batch.mask] = torch.tensor([x for row in rows for x in row], dtype=dtype)
    again = batch.stream("log_probs", dtype).requires_grad_()
    explicit = inputs(batch, dtype, log_probs=again, old_log_probs=streams[0], weights=streams[1])
    if batch.mask.any():
        (expected,) = torch.autograd.grad(actor_loss(explicit, plain, counts).loss, again)
        (actual,) = torch.autograd.grad(result.loss, own)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_rejection_of_an_interpolated_anchor_takes_the_gradient_and_leaves_the_counts() -> None:
    batch = make_batch([4, 4], [8, 5, 0, 3, 6, 2, 9, 1], 0.2, seed=6)
    rule = Rejection("k1", "token", high=1.2)
    share = torch.full((batch.mask.numel(),), 0.5)
    logs = [[(x - r) / 2 for x, r in zip(*rows, strict=True)]
            for rows in zip(batch.kept("log_probs"), batch.kept("rollout"), strict=True)]  # fmt: skip
    passes = [p for row in oracle_correction.kept(logs, "k1", "token", 1 / 1.2, 1.2) for p in row]
    given_ = inputs(batch, torch.float64, old_log_probs=None, weights=None, rollout_share=share)
    own = given_.log_probs.requires_grad_()
    counts = LossCounts.of(batch.mask, batch.segments)
    result = actor_loss(given_, LossSettings(policy_loss="reinforce", correction=Correction(None, (rule,))), counts)
    assert 0 < sum(passes) < len(passes)
    assert float(result.metrics["actor/rejected_fraction"]) == pytest.approx(1 - sum(passes) / len(passes))
    (gradient,) = torch.autograd.grad(result.loss, own)
    kept_tokens = torch.zeros_like(batch.mask)
    kept_tokens[batch.mask] = torch.tensor(passes)
    expected = torch.where(kept_tokens, -batch.stream("advantages", torch.float64) / int(batch.mask.sum()), 0)
    torch.testing.assert_close(gradient, expected)


def parts_of(batch: Ragged, pieces: int) -> list[Ragged]:
    return [batch.reordered(list(range(k, len(batch.lengths), pieces))) for k in range(pieces)]


def of_part(batch: Ragged, settings_: LossSettings, counts: LossCounts, weight: torch.Tensor) -> Loss:
    """The loss of a part under a "model" with one parameter that scales every log-prob."""
    given_ = inputs(batch, torch.float64, segments=batch.segments_for(settings_.aggregation, torch.float64))
    if settings_.policy_loss in ("clipCov", "klCov"):
        given_ = replace(given_, selection=batch.stream("advantages", torch.float64) > 0.5)
    finite = torch.where(batch.mask, given_.log_probs, 0)  # the chain rule of the model itself must not see NaN
    return actor_loss(replace(given_, log_probs=finite * weight), settings_, counts)


@pytest.mark.parametrize("kind", aggregations)
@pytest.mark.parametrize("name", policy_losses)
def test_micro_batches_and_ranks_add_up_to_the_mini_batch(name: str, kind: str) -> None:
    """Loss, gradient and every metric of 1, 2, 4 and 7 parts, each normalised by the counts of all."""
    batch = make_batch([3, 4], [5, 0, 9, 1, 2, 7, 4], 0.2, seed=8)
    chosen = LossSettings(name, {}, kind, SCALED.get(kind, {}), "k2", 0.1, 0.02)
    results = []
    for pieces in (1, 2, 4, 7):
        parts = parts_of(batch, pieces)
        counts = LossCounts(0, 0)
        for part in parts:
            counts += LossCounts.of(part.mask, part.segments_for(kind, torch.float64))
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        metrics: dict[str, float] = {}
        for part in parts:
            loss = of_part(part, chosen, counts, weight)
            loss.loss.backward()
            for key, value in loss.metrics.items():
                metrics[key] = metrics.get(key, 0.0) + float(value)
        assert weight.grad is not None
        results.append(metrics | {"gradient": float(weight.grad)})
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-12, abs=1e-12)


@PRECISION
@pytest.mark.parametrize("bound", [None, 0.3])
@pytest.mark.parametrize("kind", ["tokenMean", "seqMeanTokenMean"])
@given(batch=batches())
def test_the_critic_loss(dtype: torch.dtype, bound: float | None, kind: str, batch: Ragged) -> None:
    chosen = LossSettings(aggregation=kind, value_clip=bound)
    rows = [
        [oracle.value_loss(*token, bound) for token in zip(*rows, strict=True)]
        for rows in zip(batch.kept("values"), batch.kept("returns"), batch.kept("old_values"), strict=True)
    ]
    values = batch.stream("values", dtype).requires_grad_()
    result = critic_loss(
        values,
        batch.stream("returns", dtype),
        batch.mask,
        batch.segments,
        chosen,
        LossCounts.of(batch.mask, batch.segments),
        batch.stream("old_values", dtype),
    )
    near("value loss", result.loss, oracle.aggregate(rows, kind))
    near(
        "value loss (prediction)",
        result.metrics["critic/prediction/mean"],
        oracle.aggregate(batch.kept("values"), "tokenMean"),
    )
    result.loss.backward()
    assert values.grad is not None
    assert bool(values.grad.isfinite().all())
    assert bool((values.grad[~batch.mask] == 0).all())


def test_the_gradient_of_the_value_loss_stops_where_the_clip_holds() -> None:
    """V = 1, V_old = 0, clip 0.5, so V is clipped to 0.5.

    R = 0: the plain error 1 beats 0.25, slope V - R = 1. R = 2: 2.25 beats the plain 1, and the clip does not move.
    """
    values = torch.ones(2, requires_grad=True)
    mask = torch.ones(2, dtype=torch.bool)
    result = critic_loss(
        values,
        torch.tensor([0.0, 2.0]),
        mask,
        Segments.from_lengths([2]),
        LossSettings(aggregation="tokenSum", value_clip=0.5),
        LossCounts(2, 1),
        torch.zeros(2),
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.5 * (1 + 2.25))
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0]
    assert float(result.metrics["critic/clip_fraction"]) == 0.5


@PRECISION
@pytest.mark.parametrize("kind", kl_estimators)
@given(batch=batches())
def test_kl_estimators(dtype: torch.dtype, kind: str, batch: Ragged) -> None:
    mask = batch.mask
    x = batch.stream("log_probs", dtype)[mask].requires_grad_()
    reference = batch.stream("reference", dtype)[mask]
    value = kl_estimators[kind](x, reference)
    pairs = list(zip(x.tolist(), reference.tolist(), strict=True))
    near(f"kl {kind}", value, [oracle.kl(kind, a, b) for a, b in pairs])
    if kind in ("k2", "k3", "abs", "k3Straight", "absStraight"):
        assert bool((value >= 0).all())
    (gradient,) = torch.autograd.grad(value.sum(), x) if pairs else (torch.zeros(0),)
    # d/dx: k1 -> 1, |d| -> sign, k2 and straight-through -> d, k3 -> 1 - e^-d where neither bound holds
    slopes = []
    for a, b in pairs:
        d = a - b
        held = abs(d) > 20 or oracle.kl("k3", a, b) >= 10.0
        slope = {"k1": 1.0, "abs": float((d > 0) - (d < 0)), "k3": 0.0 if held else 1 - math.exp(-d)}
        slopes.append(slope.get(kind, d))
    near(f"kl gradient {kind}", gradient.to(dtype), slopes)


@pytest.mark.parametrize("aggregation", ["tokenMean", "seqMeanTokenMean"])
@pytest.mark.parametrize("kind", kl_estimators)
@settings(max_examples=6)
@given(batch=batches(extreme=False, longest=6))
def test_the_gradient_of_a_kl_in_the_loss(kind: str, aggregation: str, batch: Ragged) -> None:
    """Without advantages the policy loss is 0, and so is its gradient."""
    frozen, reference = batch.kept("log_probs"), batch.kept("reference")

    def total(rows: Rows) -> float:
        kl = [[oracle.kl_in_loss(kind, *token) for token in zip(*streams, strict=True)]
              for streams in zip(rows, frozen, reference, strict=True)]  # fmt: skip
        return 0.3 * oracle.aggregate(kl, aggregation)

    log_probs = batch.stream("log_probs", torch.float64).requires_grad_()
    given_ = inputs(batch, torch.float64, log_probs=log_probs, advantages=torch.zeros(batch.mask.numel()))
    chosen = LossSettings("gpg", {}, aggregation, kl_kind=kind, kl_coefficient=0.3)
    actor_loss(given_, chosen, LossCounts.of(batch.mask, batch.segments)).loss.backward()
    assert log_probs.grad is not None
    assert bool((log_probs.grad[~batch.mask] == 0).all())
    expected = finite_differences(batch.kept("log_probs"), total)
    same_slopes(f"gradient of the kl {kind} in the loss", log_probs.grad[batch.mask], expected)


@pytest.mark.parametrize(("policy_loss", "anchor"), [("gpg", "old"), ("bypassReinforce", "rollout")])
@settings(max_examples=10)
@given(batch=batches(extreme=False, longest=6))
def test_an_importance_weighted_kl(policy_loss: str, anchor: str, batch: Ragged) -> None:
    """The ratio is to the anchor of the policy loss. Without advantages that loss is 0."""
    old, reference = batch.kept(anchor), batch.kept("reference")

    def total(rows: Rows) -> float:
        kl = [[oracle.importance_weighted_kl(*token) for token in zip(*streams, strict=True)]
              for streams in zip(rows, old, reference, strict=True)]  # fmt: skip
        return 0.3 * oracle.aggregate(kl, "tokenMean")

    log_probs = batch.stream("log_probs", torch.float64).requires_grad_()
    given_ = inputs(batch, torch.float64, log_probs=log_probs, advantages=torch.zeros(batch.mask.numel()))
    chosen = LossSettings(policy_loss, kl_kind="k3Weighted", kl_coefficient=0.3)
    result = actor_loss(given_, chosen, LossCounts.of(batch.mask, batch.segments))
    result.loss.backward()
    assert log_probs.grad is not None
    assert bool((log_probs.grad[~batch.mask] == 0).all())
    rows = batch.kept("log_probs")
    apart = [x - r for pair in zip(rows, reference, strict=True) for x, r in zip(*pair, strict=True)]
    if min(apart, default=0.0) > -2.5:  # k3 below its bound
        near("kl k3Weighted", result.loss, total(rows))
    same_slopes(
        "gradient of the kl k3Weighted in the loss", log_probs.grad[batch.mask], finite_differences(rows, total)
    )


def test_an_importance_weighted_kl_is_unbiased_for_samples_of_an_older_policy() -> None:
    """Of four tokens, drawn from pi_old: the mean over it has the value and the slopes of KL(pi, pi_ref). Plain k3 has
    neither."""
    logits = torch.tensor([0.3, -0.5, 1.2, 0.1], dtype=torch.float64, requires_grad=True)
    old, ref = (torch.tensor(x, dtype=torch.float64).log_softmax(0) for x in ([1.0, 0, 0, -1], [0.0, 1, -1, 0.5]))
    pi = logits.log_softmax(0)
    exact = (pi.exp() * (pi - ref)).sum()
    (slopes,) = torch.autograd.grad(exact, logits, retain_graph=True)
    mask, segments = torch.ones(4, dtype=torch.bool), Segments.from_lengths([4])
    given_ = PolicyInputs(pi, torch.zeros(4), mask, segments, old_log_probs=old, ref_log_probs=ref)

    def of(kind: str) -> tuple[float, torch.Tensor]:
        chosen = LossSettings("gpg", kl_kind=kind, kl_coefficient=1.0)
        # Each token as often as pi_old draws it: its own mini-batch of a fraction of a token.
        per_token = [
            actor_loss(replace(given_, mask=torch.arange(4) == t), chosen, LossCounts(1, 1)).loss * old[t].exp()
            for t in range(4)
        ]
        total = torch.stack(per_token).sum()
        return float(total.detach()), torch.autograd.grad(total, logits, retain_graph=True)[0]

    value, gradient = of("k3Weighted")
    assert value == pytest.approx(float(exact.detach()))
    torch.testing.assert_close(gradient, slopes)
    value, gradient = of("k3")
    assert value != pytest.approx(float(exact.detach()), rel=0.05)
    assert not torch.allclose(gradient, slopes, rtol=0.05)


@settings(max_examples=10)
@given(batch=batches())
def test_where_pi_old_is_the_policy_an_importance_weight_is_1(batch: Ragged) -> None:
    """The value of k3 as without, and k2's gradient; also where k3 is at its bound."""
    counts = LossCounts.of(batch.mask, batch.segments)
    results = []
    for kind in ("k3Weighted", "k3Straight"):
        log_probs = batch.stream("log_probs", torch.float64).requires_grad_()
        given_ = inputs(batch, torch.float64, log_probs=log_probs, old_log_probs=None)
        chosen = LossSettings("gpg", kl_kind=kind, kl_coefficient=0.3)
        loss = actor_loss(given_, chosen, counts).loss
        loss.backward()
        results.append((loss, log_probs.grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("aggregation", ["tokenMean", "seqMeanTokenMean"])
@pytest.mark.parametrize("bound", [None, 0.5, 0.1])
@settings(max_examples=10)
@given(batch=batches(extreme=False, longest=6))
def test_the_gradient_of_the_critic_loss(bound: float | None, aggregation: str, batch: Ragged) -> None:
    returns, anchor = batch.kept("returns"), batch.kept("old_values")

    def total(rows: Rows) -> float:
        losses = [[oracle.value_loss(*token, bound) for token in zip(*streams, strict=True)]
                  for streams in zip(rows, returns, anchor, strict=True)]  # fmt: skip
        return oracle.aggregate(losses, aggregation)

    values = batch.stream("values", torch.float64).requires_grad_()
    chosen, counts = LossSettings(aggregation=aggregation, value_clip=bound), LossCounts.of(batch.mask, batch.segments)
    old_values = batch.stream("old_values", torch.float64)
    targets = batch.stream("returns", torch.float64)
    critic_loss(values, targets, batch.mask, batch.segments, chosen, counts, old_values).loss.backward()
    assert values.grad is not None
    same_slopes("gradient of the value loss", values.grad[batch.mask], finite_differences(batch.kept("values"), total))


def test_what_a_loss_needs_and_does_not_get_is_named() -> None:
    batch = make_batch([2], [3, 4], 0.0, seed=1)
    counts = LossCounts.of(batch.mask, batch.segments)
    with pytest.raises(ValueError, match="bypassPpoClip needs the rollout log-probs"):
        actor_loss(inputs(batch, torch.float32, rollout_log_probs=None), LossSettings("bypassPpoClip"), counts)
    with pytest.raises(ValueError, match="reference's log-probs"):
        actor_loss(inputs(batch, torch.float32, ref_log_probs=None), LossSettings(kl_kind="k3"), counts)
    with pytest.raises(ValueError, match="vocabulary_kl"):
        actor_loss(inputs(batch, torch.float32), LossSettings(kl_kind="full"), counts)
    with pytest.raises(ValueError, match="entropy of the tokens"):
        actor_loss(inputs(batch, torch.float32, entropy=None), LossSettings(entropy_coefficient=0.1), counts)
    with pytest.raises(ValueError, match="select_tokens"):
        actor_loss(inputs(batch, torch.float32), LossSettings("clipCov"), counts)
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        actor_loss(inputs(batch, torch.float32), LossSettings("ppoClip", {"dual_clip": 0.5}), counts)
    with pytest.raises(ValueError, match="needs the setting 'scale'"):
        actor_loss(inputs(batch, torch.float32), LossSettings(aggregation="seqMeanTokenSumNorm"), counts)
    with pytest.raises(ValueError, match="promptMean needs the shares"):
        actor_loss(inputs(batch, torch.float32), LossSettings(aggregation="promptMean"), counts)
    with pytest.raises(ValueError, match="scale must be above 0"):
        actor_loss(
            inputs(batch, torch.float32), LossSettings("ppoClip", {}, "seqMeanTokenSumNorm", {"scale": 0.0}), counts
        )
    with pytest.raises(ValueError, match="values at sampling time"):
        critic_loss(torch.ones(7), torch.ones(7), batch.mask, batch.segments, LossSettings(value_clip=0.5), counts)


def test_the_exact_kl_takes_the_place_of_an_estimate() -> None:
    batch = make_batch([2], [3, 4], 0.3, seed=1)
    exact = batch.stream("entropy", torch.float64)  # any stream of numbers
    chosen = LossSettings("gpg", kl_kind="full", kl_coefficient=2.0)
    counts = LossCounts.of(batch.mask, batch.segments)
    with_kl = actor_loss(inputs(batch, torch.float64, vocabulary_kl=exact), chosen, counts)
    without = actor_loss(inputs(batch, torch.float64), LossSettings("gpg"), counts)
    assert float(with_kl.loss - without.loss) == pytest.approx(2 * oracle.aggregate(batch.kept("entropy"), "tokenMean"))


@settings(max_examples=10)
@given(batch=batches())
def test_extremes_of_the_ratio_are_over_unmasked_tokens(batch: Ragged) -> None:
    counts = LossCounts.of(batch.mask, batch.segments)
    for name, anchor in (("ppoClip", "old"), ("bypassPpoClip", "rollout")):
        pairs = zip(batch.kept("log_probs"), batch.kept(anchor), strict=True)
        logs = [max(min(x - o, 20.0), -20.0) for a, b in pairs for x, o in zip(a, b, strict=True)]
        extremes = actor_loss(inputs(batch, torch.float64), LossSettings(name), counts).extremes
        if logs:
            assert float(extremes["actor/ratio/max"]) == pytest.approx(math.exp(max(logs)))
            assert float(extremes["actor/ratio/min"]) == pytest.approx(math.exp(min(logs)))
        else:
            assert extremes == {}
    assert actor_loss(inputs(batch, torch.float64, old_log_probs=None), LossSettings(), counts).extremes == {}
