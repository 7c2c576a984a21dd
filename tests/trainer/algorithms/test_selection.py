"""Which samples and tokens are chosen: dynamic sampling, resampling, overlong responses, covariance selection."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import oracle_losses as oracle
import pytest
import torch
from hypothesis import given, settings
from ragged import Ragged, batches, make_batch

from rljob_trainer.algorithms import (
    LossCounts,
    PolicyInputs,
    Segments,
    actor_loss,
    clipped_scores,
    normalised_scores,
    policy_losses,
    resampled,
    without_truncated,
)
from rljob_trainer.algorithms.selection import resampling_weights
from rljob_trainer.learner.protocol import LossSettings


def test_truncated_sequences_leave_the_mask() -> None:
    segments = Segments.from_lengths([2, 0, 3])
    mask = torch.tensor([True, False, True, True, False])
    kept = without_truncated(mask, segments, torch.tensor([False, True, True]))
    assert kept.tolist() == [True, False, False, False, False]


def test_scores_are_clipped_and_normalised() -> None:
    assert clipped_scores(torch.tensor([-5.0, 0.5, 5.0]), -1.0, 1.0).tolist() == [-1.0, 0.5, 1.0]
    with pytest.raises(ValueError, match="low <= high"):
        clipped_scores(torch.zeros(1), 1.0, -1.0)
    torch.testing.assert_close(normalised_scores(torch.tensor([1.0, 2.0, 3.0])), torch.tensor([-1.0, 0.0, 1.0]))
    assert normalised_scores(torch.tensor([5.0])).tolist() == [0.0]
    assert normalised_scores(torch.zeros(0)).tolist() == []


def test_normalising_equal_scores_gives_exactly_0() -> None:
    """In float32 their mean is off by a rounding error, which over the root of 1e-8 was 6e-4."""
    for score in (0.6, 0.1, -1.7, 1e6):
        assert not normalised_scores(torch.full((20,), score)).any()


@pytest.mark.parametrize("scale", [2000.0, 1.0, 1e-6])
def test_a_large_power_of_large_and_small_scores_weighs_them_alike(scale: float) -> None:
    """2000^100 is no float64 and (1e-6)^100 is 0; the shares are those of 1 and 0.5^100 = 2^-100."""
    scores = torch.tensor([-scale, scale / 2, 0.0])
    expected = torch.tensor([1.0, 2.0**-100, 0.0], dtype=torch.float64)
    torch.testing.assert_close(resampling_weights(scores, "pow", 100.0), expected, rtol=1e-12, atol=0)
    assert resampled(scores, torch.Generator().manual_seed(0), power=100.0).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("pow", [1.0, 4.0, 0.0, 9.0]), ("maxMin", [1.0, 0.0, 0.0, 1.0]), ("maxRandom", [0.1, 0.1, 0.1, 0.4])],
)
def test_resampling_draws_with_the_published_weights(kind: Any, weights: list[float]) -> None:
    """arXiv 2409.06957; 40,000 draws: each share within five standard deviations of its weight."""
    scores = torch.tensor([-1.0, 2.0, 0.0, 3.0]).repeat(10_000)
    scores[2::4] = 0.0
    drawn = resampled(scores, torch.Generator().manual_seed(0), kind=kind)
    again = resampled(scores, torch.Generator().manual_seed(0), kind=kind)
    assert torch.equal(drawn, again)
    for value, weight in zip([-1.0, 2.0, 0.0, 3.0], weights, strict=True):
        share = weight / sum(weights)
        seen = float((scores[drawn] == value).double().mean())
        assert abs(seen - share) <= 5 * math.sqrt(share * (1 - share) / 40_000)


def test_resampling_without_any_weight_is_uniform_and_an_unknown_kind_is_refused() -> None:
    drawn = resampled(torch.zeros(1000), torch.Generator().manual_seed(0))
    assert len(drawn.unique()) > 500
    with pytest.raises(ValueError, match="'best'"):
        resampled(torch.zeros(3), torch.Generator(), kind="best")  # type: ignore[arg-type]


def whole(batch: Ragged) -> PolicyInputs:
    return PolicyInputs(
        log_probs=batch.stream("log_probs", torch.float64),
        old_log_probs=batch.stream("old", torch.float64),
        advantages=batch.stream("advantages", torch.float64),
        mask=batch.mask,
        segments=batch.segments,
    )


def covariance(batch: Ragged) -> list[float]:
    return [c for row in oracle.covariances(batch.kept("log_probs"), batch.kept("advantages")) for c in row]


@settings(max_examples=15)
@given(batch=batches(extreme=False))
def test_kl_cov_selects_the_largest_covariances(batch: Ragged) -> None:
    values = covariance(batch)
    chosen = policy_losses["klCov"].select_tokens(whole(batch), torch.Generator(), covariance_fraction=0.3)
    assert not bool(chosen[~batch.mask].any())
    wanted = min(max(int(0.3 * len(values)), 1), len(values))
    expected = sorted(range(len(values)), key=lambda i: -values[i])[:wanted]
    assert chosen[batch.mask].nonzero().flatten().tolist() == sorted(expected)


def has_gradient(advantage: float, ratio: float, dual_clip: float | None) -> bool:
    """PPO's loss max(-A rho, -A clip(rho, 0.8, 1.2)), at most -A dual_clip for A < 0, moves with rho."""
    if advantage > 0:
        return ratio <= 1.2
    return ratio >= 0.8 and (dual_clip is None or ratio <= dual_clip)


@pytest.mark.parametrize(("exclude", "dual_clip"), [(True, None), (True, 1.3), (False, None)])
@settings(max_examples=15)
@given(batch=batches(extreme=False))
def test_clip_cov_selects_at_random_inside_the_band(exclude: bool, dual_clip: float | None, batch: Ragged) -> None:
    """The paper's formula (arXiv 2505.22617, eq. 12), or, as in its published code, without what PPO has clipped."""
    values = covariance(batch)
    of_tokens = [
        has_gradient(a, math.exp(x - o), dual_clip)
        for rows in zip(batch.kept("advantages"), batch.kept("log_probs"), batch.kept("old"), strict=True)
        for a, x, o in zip(*rows, strict=True)
    ]
    band = {i for i, v in enumerate(values) if 0.1 < v < 1.0 and (of_tokens[i] or not exclude)}
    settings_ = {
        "covariance_fraction": 0.2,
        "covariance_low": 0.1,
        "covariance_high": 1.0,
        "exclude_clipped": exclude,
        "dual_clip": dual_clip,
    }

    def draw(seed: int) -> set[int]:
        chosen = policy_losses["clipCov"].select_tokens(whole(batch), torch.Generator().manual_seed(seed), **settings_)
        assert not bool(chosen[~batch.mask].any())
        return set(chosen[batch.mask].nonzero().flatten().tolist())

    wanted = min(max(int(0.2 * len(values)), 1), len(band))
    draws = [draw(seed) for seed in range(6)]
    assert all(len(d) == wanted and d <= band for d in draws)
    assert draw(3) == draws[3]
    if 0 < wanted < len(band) - 1 and len(band) > 5:
        assert len({frozenset(d) for d in draws}) > 1


def test_clip_cov_takes_the_gradient_of_every_token_that_it_draws() -> None:
    """Ratios of half the tokens are beyond the clip; without ``exclude_clipped`` some of them are drawn."""
    lost: dict[bool, int] = {True: 0, False: 0}
    for seed in range(8):
        batch = make_batch([4, 4], [8, 5, 0, 3, 9, 9, 2, 6], 0.2, seed=seed)
        for exclude in lost:
            params = {"covariance_fraction": 0.5, "covariance_low": 0.01, "exclude_clipped": exclude}
            generator = torch.Generator().manual_seed(seed)
            chosen = policy_losses["clipCov"].select_tokens(whole(batch), generator, **params)
            given_ = whole(batch)
            log_probs = given_.log_probs.clone().requires_grad_()
            policy_losses["ppoClip"](replace(given_, log_probs=log_probs)).per_token.sum().backward()
            assert log_probs.grad is not None
            lost[exclude] += int((chosen & (log_probs.grad == 0)).sum())
    assert lost[True] == 0
    assert lost[False] > 0


def test_a_fraction_below_one_token_selects_one() -> None:
    """Four tokens with mean A 0 and mean log pi -2: cov = (3, 0, 0, 1); by default a fraction of 2e-4 is held back."""
    log_probs = torch.tensor([-1.0, -2.0, -2.0, -3.0])
    given_ = PolicyInputs(
        log_probs=log_probs,
        advantages=torch.tensor([3.0, -1.0, -1.0, -1.0]),
        mask=torch.ones(4, dtype=torch.bool),
        segments=Segments.from_lengths([4]),
        old_log_probs=log_probs,
    )
    assert policy_losses["klCov"].select_tokens(given_, torch.Generator()).tolist() == [True, False, False, False]
    # Between 1 and 5, both excluded, lies the 3 alone; between 4 and 5 lies none.
    assert policy_losses["clipCov"].select_tokens(given_, torch.Generator()).tolist() == [True, False, False, False]
    assert not policy_losses["clipCov"].select_tokens(given_, torch.Generator(), covariance_low=4.0).any()
    nothing = replace(given_, mask=torch.zeros(4, dtype=torch.bool))
    for name in ("clipCov", "klCov"):
        assert not policy_losses[name].select_tokens(nothing, torch.Generator()).any()


def test_a_loss_without_selection_selects_nothing() -> None:
    batch = make_batch([4], [8, 5, 0, 3], 0.2, seed=4)
    with pytest.raises(ValueError, match="selects no tokens"):
        policy_losses["ppoClip"].select_tokens(whole(batch), torch.Generator())


@pytest.mark.parametrize("name", ["clipCov", "klCov"])
def test_ranks_that_share_a_selection_add_up_to_one_rank(name: str) -> None:
    """What the learner does: gather the mini-batch's log-probs, select alike on every rank, each keeps its part."""
    batch = make_batch([4, 4], [8, 5, 0, 3, 9, 9, 2, 6], 0.2, seed=4)
    params = {"covariance_fraction": 0.2} | ({"covariance_low": 0.1} if name == "clipCov" else {})
    chosen = policy_losses[name].select_tokens(whole(batch), torch.Generator().manual_seed(7), **params)
    assert bool(chosen.any())
    counts = LossCounts.of(batch.mask, batch.segments)
    settings_ = LossSettings(name, params)

    def gradient(rows: list[int]) -> torch.Tensor:
        part = batch.reordered(rows)
        pieces = chosen.split(batch.lengths)
        given_ = whole(part)
        log_probs = given_.log_probs.clone().requires_grad_()
        selection = torch.cat([pieces[i] for i in rows])
        rank = PolicyInputs(
            log_probs, given_.advantages, part.mask, part.segments, given_.old_log_probs, selection=selection
        )
        actor_loss(rank, settings_, counts).loss.backward()
        assert log_probs.grad is not None
        return log_probs.grad

    alone = gradient(list(range(8)))
    for ranks in (2, 4):
        size = 8 // ranks
        parts = [gradient(list(range(r * size, (r + 1) * size))) for r in range(ranks)]
        torch.testing.assert_close(torch.cat(parts), alone, rtol=1e-12, atol=1e-14)
