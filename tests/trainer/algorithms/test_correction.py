"""Rollout correction against its oracle: weights, every rejection rule, diagnostics, published settings."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Literal

import oracle_correction as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import PRECISIONS, Ragged, agree, batches, make_batch, near

from rljob_trainer.algorithms import (
    Corrected,
    Correction,
    NotFiniteError,
    PolicyInputs,
    Rejection,
    Segments,
    Weights,
    agreement_metrics,
    correct,
    interpolated_log_probs,
    most_apart,
    policy_distance,
    policy_losses,
    rollout_share,
    veto,
)
from rljob_trainer.algorithms.rejection import Over, Statistic

PRECISION = pytest.mark.parametrize("dtype", PRECISIONS, ids=["float64", "float32"])
ROOT = "rollout_correction"
Level = Literal["token", "sequence"]


def corrected(batch: Ragged, dtype: torch.dtype, correction: Correction) -> Corrected:
    return correct(batch.stream("old", dtype), batch.stream("rollout", dtype), batch.mask, batch.segments, correction)


def logs(batch: Ragged) -> oracle.Rows:
    return oracle.log_ratios(batch.kept("old"), batch.kept("rollout"))


@PRECISION
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("low", "high"), [(None, 2.0), (0.5, 5.0), (None, 1e9)])
@settings(max_examples=10)
@given(batch=batches())
def test_weights(
    dtype: torch.dtype, level: Level, low: float | None, high: float, normalize: bool, batch: Ragged
) -> None:
    result = corrected(batch, dtype, Correction(Weights(level, high, low, normalize)))
    assert result.weights is not None
    agree(f"weights {level}", result.weights, batch, oracle.weights(logs(batch), level, low, high, normalize))
    assert torch.equal(result.mask, batch.mask)


@PRECISION
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
@settings(max_examples=10)
@given(batch=batches())
def test_clamped_weights_keep_both_bounds(dtype: torch.dtype, level: Level, normalize: bool, batch: Ragged) -> None:
    """max(low, min(w, high)), and nothing is zeroed (slime: --tis-clip-low, --tis-clip)."""
    result = corrected(batch, dtype, Correction(Weights(level, 1.3, 0.8, normalize, clamp=True)))
    assert result.weights is not None
    expected = oracle.weights(logs(batch), level, 0.8, 1.3, normalize, clamp=True)
    agree(f"weights {level}, clamped", result.weights, batch, expected)
    assert f"{ROOT}/weight/zeroed_ratio" not in result.metrics
    # Without a lower bound it is the plain cut.
    cut, same = (corrected(batch, dtype, Correction(Weights(level, 1.3, clamp=clamp))) for clamp in (False, True))
    assert cut.weights is not None
    assert same.weights is not None
    assert torch.equal(cut.weights, same.weights)
    assert same.metrics == cut.metrics


@settings(max_examples=15)
@given(batch=batches())
def test_normalised_weights_have_mean_1(batch: Ragged) -> None:
    tokens = corrected(batch, torch.float64, Correction(Weights("token", 2.0, normalize=True))).weights
    sequences = corrected(batch, torch.float64, Correction(Weights("sequence", 2.0, normalize=True))).weights
    assert tokens is not None
    assert sequences is not None
    if bool(batch.mask.any()):
        assert float(tokens[batch.mask].mean()) == pytest.approx(1)
        filled = batch.segments.count(batch.mask) > 0
        assert float(batch.segments.max(sequences, batch.mask)[filled].mean()) == pytest.approx(1)


PER_SEQUENCE: tuple[Over, ...] = ("sequenceSum", "sequenceMean")
NEVER_NEGATIVE: tuple[Statistic, ...] = ("k2", "k3")
RULES = [
    *(Rejection("k1", over, 1.5, low) for over in ("token", *PER_SEQUENCE) for low in (None, 0.8)),
    *(Rejection(kind, over, 0.05) for kind in NEVER_NEGATIVE for over in ("token", "sequenceMean")),
    *(Rejection(kind, over, 0.3) for kind in NEVER_NEGATIVE for over in ("sequenceSum", "sequenceMax")),
    Rejection("k1", "sequenceMax", 2.5),
    veto(0.5),
]


@PRECISION
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}, {rule.lower:.2g} to {rule.high:g}")
@settings(max_examples=10)
@given(batch=batches())
def test_rejection(dtype: torch.dtype, rule: Rejection, batch: Ragged) -> None:
    passes = oracle.kept(logs(batch), rule.statistic, rule.over, rule.low, rule.high)
    result = corrected(batch, dtype, Correction(rejection=(rule,)))
    assert result.mask[batch.mask].tolist() == [p for row in passes for p in row]
    assert not bool(result.mask[~batch.mask].any())

    gone = [not p for row in passes for p in row]
    name = f"{ROOT}/rejection/{rule.name}"
    share = sum(gone) / max(len(gone), 1)
    filled = [row for row in passes if row]
    touched = sum(not all(row) for row in filled) / max(len(filled), 1)
    for key in (name, f"{ROOT}/rejection"):
        assert result.metrics[f"{key}/masked_ratio"] == pytest.approx(share)
        assert result.metrics[f"{key}/masked_sequence_ratio"] == pytest.approx(touched)


DIVERGENCES = [
    *(Rejection("tv", over, high) for over, high in (("token", 0.05), ("sequenceMean", 0.05), ("sequenceMax", 0.1))),
    *(Rejection("binaryKl", over, 0.01) for over in ("token", "sequenceMean", "sequenceMax")),
    Rejection("binaryKl", "sequenceSum", 0.05),
]


@PRECISION
@pytest.mark.parametrize("rule", DIVERGENCES, ids=lambda rule: rule.name)
@settings(max_examples=15)
@given(batch=batches())
def test_rejection_by_the_divergence_of_a_token(dtype: torch.dtype, rule: Rejection, batch: Ragged) -> None:
    """By how far its probability is off, on either side and whatever its advantage."""
    passes = oracle.kept_by_divergence(batch.kept("old"), batch.kept("rollout"), rule.statistic, rule.over, rule.high)
    result = corrected(batch, dtype, Correction(rejection=(rule,)))
    assert result.mask[batch.mask].tolist() == [p for row in passes for p in row]
    assert not bool(result.mask[~batch.mask].any())
    if rule.over == "token":
        pairs = zip(batch.kept("old"), batch.kept("rollout"), strict=True)
        values = [oracle.divergence(rule.statistic, x, y) for row in pairs for x, y in zip(*row, strict=True)]
        near(f"rejection {rule.name}", torch.tensor(result.metrics[f"{ROOT}/rejection/{rule.name}/mean"], dtype=dtype),
             oracle.mean(values))  # fmt: skip


def test_a_small_probability_may_be_off_by_any_factor_and_a_large_one_may_not() -> None:
    """A token from 1e-5 to 1e-3 is kept (its ratio is 100), one from 0.99 to 0.8 is not (0.8)."""
    old, rollout = torch.tensor([1e-3, 0.8]).log(), torch.tensor([1e-5, 0.99]).log()
    mask, segments = torch.ones(2, dtype=torch.bool), Segments.from_lengths([2])
    for rule in (Rejection("tv", high=0.1), Rejection("binaryKl", high=0.05)):
        assert correct(old, rollout, mask, segments, Correction(rejection=(rule,))).mask.tolist() == [True, False]


def test_a_token_that_is_impossible_for_the_trainer_diverges() -> None:
    old, rollout = torch.tensor([0.0, 0.5]).log(), torch.tensor([0.7, 0.5]).log()
    mask, segments = torch.ones(2, dtype=torch.bool), Segments.from_lengths([2])
    for rule in (Rejection("tv", high=0.1), Rejection("binaryKl", high=0.05)):
        assert correct(old, rollout, mask, segments, Correction(rejection=(rule,))).mask.tolist() == [False, True]
    # One that is improbable for the engine too is but 0.01 away.
    rollout = torch.tensor([0.01, 0.5]).log()
    assert correct(old, rollout, mask, segments, Correction(rejection=(Rejection("tv", high=0.1),))).mask.all()


def test_several_rules_apply_together() -> None:
    batch = make_batch([4, 4], [6] * 8, 0.2, seed=9)
    first, second = Rejection("k1", "token", high=1.3), Rejection("k3", "sequenceMean", high=0.06)
    apart = [corrected(batch, torch.float64, Correction(rejection=(rule,))).mask for rule in (first, second)]
    together = corrected(batch, torch.float64, Correction(rejection=(first, second))).mask
    assert torch.equal(together, apart[0] & apart[1])
    assert not torch.equal(apart[0], apart[1])


def test_the_bounds_of_k1_are_bounds_of_old_over_rollout() -> None:
    """A ratio of 3 passes [0.9, 4] and not [0.25, 1.2], whatever its inverse does."""
    mask, segments = torch.ones(1, dtype=torch.bool), Segments.from_lengths([1])
    old, rollout = torch.tensor([math.log(0.3)]), torch.tensor([math.log(0.1)])
    for (low, high), passes in {(0.9, 4.0): True, (0.25, 1.2): False}.items():
        rule = Rejection("k1", "token", high=high, low=low)
        assert bool(correct(old, rollout, mask, segments, Correction(rejection=(rule,))).mask.item()) is passes


@PRECISION
@settings(max_examples=20)
@given(batch=batches())
def test_diagnostics(dtype: torch.dtype, batch: Ragged) -> None:
    metrics = corrected(batch, dtype, Correction(Weights("token", 1.2))).metrics
    for name, value in oracle.diagnostics(batch.kept("old"), batch.kept("rollout")).items():
        near(f"metric {name}", torch.tensor(metrics[f"{ROOT}/{name}"], dtype=dtype), value)


def reported(name: str, metrics: dict[str, float], expected: dict[str, float], dtype: torch.dtype) -> None:
    """Exactly the expected names, each with its value; a deviation is measured against the largest value it is of."""
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        root, _, statistic = key.rpartition("/")
        scale = 1.0
        if statistic == "std":
            scale = max(1.0, *(abs(expected[f"{root}/{end}".lstrip("/")]) for end in ("min", "max")))
        near(f"metric {name} {key}", torch.tensor(metrics[key] / scale, dtype=dtype), value / scale)


def under(root: str, metrics: dict[str, float]) -> dict[str, float]:
    """The metrics whose names begin with ``root``, by what follows."""
    return {name.removeprefix(root): value for name, value in metrics.items() if name.startswith(root)}


@PRECISION
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("low", "high"), [(None, 1.2), (0.5, 5.0)])
@settings(max_examples=15)
@given(batch=batches())
def test_diagnostics_of_weights(
    dtype: torch.dtype, level: Level, low: float | None, high: float, normalize: bool, batch: Ragged
) -> None:
    metrics = corrected(batch, dtype, Correction(Weights(level, high, low, normalize))).metrics
    expected = oracle.weight_diagnostics(logs(batch), level, low, high, normalize)
    of_weights = {f"weight/{name}": value for name, value in under(f"{ROOT}/weight/", metrics).items()}
    reported(f"of weights ({level})", of_weights, expected, dtype)


@PRECISION
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}, {rule.lower:.2g} to {rule.high:g}")
@settings(max_examples=15)
@given(batch=batches())
def test_diagnostics_of_rejection(dtype: torch.dtype, rule: Rejection, batch: Ragged) -> None:
    metrics = under(f"{ROOT}/rejection/{rule.name}/", corrected(batch, dtype, Correction(rejection=(rule,))).metrics)
    seen = {name: value for name, value in metrics.items() if not name.startswith("masked_")}  # these: test_rejection
    expected = oracle.rejection_diagnostics(logs(batch), rule.statistic, rule.over, rule.low, rule.high)
    reported("of rejection", seen, expected, dtype)


EVERYTHING = [
    Correction(
        Weights(level, 1.5, low, normalize), (Rejection("k1", "token", 1.5), Rejection("k3", "sequenceMax", 0.2))
    )
    for level, low, normalize in (("token", None, True), ("sequence", 0.5, False))
]


def rows(stream: torch.Tensor, batch: Ragged) -> list[list[float]]:
    return [piece.tolist() for piece in stream.split(batch.lengths)]


def same_correction(batch: Ragged, chosen: list[int], correction: Correction) -> None:
    """The chosen sequences, which hold every token that counts, in that order, are corrected as in the whole batch."""
    whole = corrected(batch, torch.float64, correction)
    part = batch.reordered(chosen)
    alone = corrected(part, torch.float64, correction)
    assert whole.weights is not None
    assert alone.weights is not None
    assert rows(alone.mask, part) == [rows(whole.mask, batch)[i] for i in chosen]
    for ours, theirs in zip(rows(alone.weights, part), [rows(whole.weights, batch)[i] for i in chosen], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12)
    assert alone.metrics == pytest.approx(whole.metrics, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("correction", EVERYTHING, ids=["token", "sequence"])
@given(batch=batches(extreme=False), random=st.randoms(use_true_random=False))
def test_the_order_of_the_sequences_does_not_matter(correction: Correction, batch: Ragged, random: Random) -> None:
    order = list(range(len(batch.lengths)))
    random.shuffle(order)
    same_correction(batch, order, correction)


@pytest.mark.parametrize("correction", EVERYTHING, ids=["token", "sequence"])
@given(batch=batches(extreme=False))
def test_sequences_without_a_token_that_counts_can_be_left_away(correction: Correction, batch: Ragged) -> None:
    batch.keep[0] = [False] * batch.lengths[0]
    same_correction(batch, [i for i, keep in enumerate(batch.keep) if any(keep)], correction)


def test_icepop_reports_what_it_zeroed_and_equal_policies_show_no_difference() -> None:
    batch = make_batch([4], [8, 5, 0, 3], 0.2, seed=4)
    ratios = [math.exp(x) for row in logs(batch) for x in row]
    metrics = corrected(batch, torch.float64, Correction(Weights("token", 1.3, 0.8))).metrics
    outside = sum(not 0.8 <= r <= 1.3 for r in ratios) / len(ratios)
    assert metrics[f"{ROOT}/weight/zeroed_ratio"] == pytest.approx(outside)

    old = batch.stream("old", torch.float64)
    correction = Correction(Weights("sequence"), (Rejection("k1", high=1.001),))
    same = correct(old, old, batch.mask, batch.segments, correction)
    for name in ("kl", "k3_kl", "chi2_token", "chi2_sequence", "log_perplexity/difference/max"):
        assert same.metrics[f"{ROOT}/{name}"] == 0.0
    assert same.metrics[f"{ROOT}/weight/effective_sample_size"] == pytest.approx(1)
    assert same.weights is not None
    assert same.weights[batch.mask].tolist() == [1.0] * int(batch.mask.sum())
    assert torch.equal(same.mask, batch.mask)


def test_the_worst_sequences_come_first() -> None:
    batch = make_batch([4], [8, 5, 0, 3], 0.0, seed=4)
    gaps = [abs(oracle.mean(row)) if row else -1 for row in logs(batch)]
    old, rollout = (batch.stream(name, torch.float64) for name in ("old", "rollout"))
    worst = most_apart(old, rollout, batch.mask, batch.segments, 9)
    assert [row for row, _ in worst] == sorted((0, 1, 3), key=lambda i: -gaps[i])  # 2 has no token
    assert [by for _, by in worst] == pytest.approx([gaps[row] for row, _ in worst])
    assert most_apart(old, rollout, batch.mask, batch.segments, 1) == worst[:1]


def test_a_nan_log_prob_is_named_by_sequence_and_token() -> None:
    batch = make_batch([2], [3, 4], 0.0, seed=4)
    batch.rows["rollout"][1][2] = math.nan
    with pytest.raises(NotFiniteError, match=r"sequence 1 .*token 2") as refused:
        corrected(batch, torch.float64, Correction())
    assert refused.value.row == 1


def test_agreement_of_trainer_and_engine() -> None:
    """Two tokens, probabilities 0.5 and 0.25 against 0.4 and 0.25; a masked third does not count."""
    trainer = torch.tensor([0.5, 0.25, math.nan]).log()
    engine = torch.tensor([0.4, 0.25, 0.9]).log()
    mask = torch.tensor([True, True, False])
    metrics = agreement_metrics(trainer, engine, mask)
    distance = policy_distance(trainer, engine, mask, Segments.from_lengths([1, 2]))
    gap = math.log(0.5 / 0.4)
    assert metrics["mismatch/tokens"] == 2
    assert metrics["mismatch/log_prob/mean"] == pytest.approx(gap / 2, rel=1e-6)
    assert metrics["mismatch/log_prob/max"] == pytest.approx(gap, rel=1e-6)
    assert metrics["mismatch/probability/max"] == pytest.approx(0.1, rel=1e-6)
    assert metrics["mismatch/probability/std"] == pytest.approx(0.05, rel=1e-6)
    assert metrics["mismatch/correlation"] == pytest.approx(1)
    assert distance.chi_square == pytest.approx((1.25**2 - 1) / 2, rel=1e-6)
    assert distance.kl == pytest.approx((1.25 - 1 - gap) / 2, rel=1e-5)
    assert distance.effective_sample_size == pytest.approx((2.25 / 2) ** 2 / ((1.25**2 + 1) / 2), rel=1e-6)


def test_agreement_and_drift_of_log_probs_that_carry_a_gradient_keep_nothing_for_one() -> None:
    trainer, engine = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), torch.tensor([-1.5, -2.0, -2.5])
    inputs = trainer * 1, engine, torch.tensor([True, True, False]), Segments.from_lengths([1, 2])
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        agreement_metrics(*inputs[:3])
        policy_distance(*inputs)
        most_apart(*inputs, 1)
    assert kept == []


def test_interpolation_anchors_old_tokens_at_the_policy_that_sampled_them() -> None:
    """arXiv 2512.06547: alpha = 1 / age, and 0 for a token of the present version."""
    rollout, present = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.full((4,), -3.0, requires_grad=True)
    result = interpolated_log_probs(rollout, present, rollout_share(torch.tensor([0, 1, 2, 4])))
    assert not result.requires_grad
    assert result.tolist() == [-3.0, -1.0, -2.0, -2.5]


@pytest.mark.parametrize(
    "rule",
    [Rejection("k1", "token", 1.7), Rejection("k1", "sequenceSum", 1.7), Rejection("tv", "token", 0.05),
     Rejection("binaryKl", "sequenceMax", 0.05)],
    ids=lambda rule: rule.name,
)  # fmt: skip
def test_rejection_inside_a_bypass_loss_takes_the_gradient_of_the_rejected(rule: Rejection) -> None:
    batch = make_batch([4, 4], [8, 5, 0, 3, 6, 2, 9, 1], 0.2, seed=6)
    log_probs = batch.stream("log_probs", torch.float64).requires_grad_()
    given_ = PolicyInputs(
        log_probs=log_probs,
        rollout_log_probs=batch.stream("rollout", torch.float64),
        advantages=batch.stream("advantages", torch.float64),
        mask=batch.mask,
        segments=batch.segments,
    )
    own, rollout = batch.kept("log_probs"), batch.kept("rollout")
    if rule.statistic == "k1":
        passes = oracle.kept(oracle.log_ratios(own, rollout), "k1", rule.over, rule.lower, rule.high)
    else:
        passes = oracle.kept_by_divergence(own, rollout, rule.statistic, rule.over, rule.high)
    gone = torch.tensor([not p for row in passes for p in row])
    assert 0 < int(gone.sum()) < len(gone)
    for name in ("bypassPpoClip", "bypassReinforce"):
        without = policy_losses[name](given_).per_token[batch.mask]
        output = policy_losses[name](given_, rejection=(rule,))
        torch.testing.assert_close(output.per_token[batch.mask], torch.where(gone, 0, without))
        assert float(output.metrics["rejected_fraction"]) == int(gone.sum())


@pytest.mark.parametrize(
    ("level", "low", "clamp"),
    [("token", None, False), ("token", 0.7, False), ("sequence", None, False), ("sequence", 0.7, True)],
)
@settings(max_examples=15)
@given(batch=batches())
def test_weights_in_a_bypass_loss_are_divided_by_their_mean_over_the_mini_batch(
    level: Level, low: float | None, clamp: bool, batch: Ragged
) -> None:
    """Found before the first gradient, so that it does not depend on how the mini-batch is cut."""
    params = {"level": level, "low": low, "high": 1.5, "normalize": True, "clamp": clamp}
    ratios = oracle.log_ratios(batch.kept("log_probs"), batch.kept("rollout"))
    weights = oracle.weights(ratios, level, low, 1.5, normalize=True, clamp=clamp)
    expected = [
        [-w * a * x for w, a, x in zip(*rows, strict=True)]
        for rows in zip(weights, batch.kept("advantages"), batch.kept("log_probs"), strict=True)
    ]

    def inputs_of(part: Ragged) -> PolicyInputs:
        return PolicyInputs(
            log_probs=part.stream("log_probs", torch.float64),
            rollout_log_probs=part.stream("rollout", torch.float64),
            advantages=part.stream("advantages", torch.float64),
            mask=part.mask,
            segments=part.segments,
        )

    loss = policy_losses["bypassReinforce"]
    found = loss.select_tokens(inputs_of(batch), torch.Generator(), **params)
    agree("bypass weights", loss(replace(inputs_of(batch), selection=found), **params).per_token, batch, expected)
    for row, piece in enumerate(found.split(batch.lengths)):
        part = batch.reordered([row])
        alone = loss(replace(inputs_of(part), selection=piece), **params).per_token
        agree("bypass weights", alone, part, [expected[row]])
    with pytest.raises(ValueError, match="select_tokens"):
        loss(inputs_of(batch), **params)
    assert not loss.looks_ahead({**params, "normalize": False})


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Weights("token", high=0.0),
        lambda: Weights("token", high=2.0, low=3.0),
        lambda: Weights("word"),  # type: ignore[arg-type]
        lambda: Rejection("k1", "token", high=0.5),
        lambda: Rejection("k1", "token", high=2.0, low=3.0),
        lambda: Rejection("k3", "token", high=0.1, low=0.01),
        lambda: Rejection("k2", "token", high=0.0),
        lambda: Rejection("tv", "token", high=0.1, low=0.01),
        lambda: Rejection("k4", "token", high=1.0),  # type: ignore[arg-type]
        lambda: Rejection("k1", "sentence", high=2.0),  # type: ignore[arg-type]
    ],
)
def test_bounds_that_make_no_sense_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"bound|level|no rejection"):
        wrong()  # type: ignore[operator]
