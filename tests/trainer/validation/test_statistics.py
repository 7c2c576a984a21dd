"""best@k, worst@k, maj@k and pass@k against the enumeration of every possible draw."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from rljob_trainer.validation.statistics import (
    Float64Array,
    best_of,
    draw_sizes,
    majority_of,
    mean_and_std,
    pass_at,
    worst_of,
)

SCORES = np.array([[0.0, 1.0, 0.5, 0.5], [2.0, -1.0, 0.0, 3.0], [1.0, 1.0, 1.0, 1.0]])


def enumerated(values: Callable[[tuple[int, ...]], float], n: int, k: int) -> tuple[float, float]:
    """Mean and standard deviation of a function of the draw over all n**k equally likely draws with replacement."""
    outcomes = [values(draw) for draw in itertools.product(range(n), repeat=k)]
    return float(np.mean(outcomes)), float(np.std(outcomes))


def chosen(row: Float64Array, choose: Callable[[Float64Array], float], draw: tuple[int, ...]) -> float:
    return choose(row[list(draw)])


def test_nothing_is_zero_and_not_minus_zero() -> None:
    assert str(worst_of(np.zeros((3, 4)), 2).mean) == "0.0"


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_best_and_worst_equal_the_enumeration_of_all_draws(k: int) -> None:
    for ours, choose in ((best_of, np.max), (worst_of, np.min)):
        rows = [enumerated(partial(chosen, row, choose), 4, k) for row in SCORES]
        expected = np.mean(rows, axis=0)
        assert ours(SCORES, k) == pytest.approx(tuple(expected))


def majority(predictions: Sequence[str | None], scores: Sequence[float], draw: tuple[int, ...]) -> list[float]:
    """The scores of the answers with most votes; those without an answer only count when nobody has one."""
    drawn = [predictions[i] for i in draw if predictions[i] is not None] or [None]
    votes = Counter(drawn)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return [float(np.mean([s for p, s in zip(predictions, scores, strict=True) if p == winner])) for winner in winners]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("predictions", "scores"),
    [
        (["a", "a", "b", "c"], [1.0, 1.0, 0.0, 0.0]),
        (["a", "b", "b", None], [1.0, 0.0, 0.0, 0.0]),
        ([None, None, None, "a"], [0.0, 0.0, 0.2, 1.0]),
        ([None, None, None, None], [0.0, 0.0, 1.0, 1.0]),
        (["a", "a", "a", "b"], [1.0, 0.5, 0.0, 0.0]),
    ],
)
def test_majority_agrees_with_the_enumeration_of_all_draws(
    predictions: list[str | None], scores: list[float], k: int
) -> None:
    winners = [majority(predictions, scores, draw) for draw in itertools.product(range(4), repeat=k)]
    mean = np.mean([np.mean(w) for w in winners])
    draws = 40_000
    ours = majority_of(np.array([scores]), [predictions], k, draws=draws, seed=1)
    # Five standard errors of a number between 0 and 1.
    assert ours.mean == pytest.approx(mean, abs=5 * 0.5 / draws**0.5)
    if scores == [1.0, 1.0, 0.0, 0.0]:  # only zeros and ones: the deviation of a coin
        assert ours.std == pytest.approx((mean * (1 - mean)) ** 0.5, abs=0.02)


def test_majority_is_the_mean_over_prompts_however_many_there_are() -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 2, (300, 8)).astype(float)
    predictions = [["right" if s else f"wrong {rng.integers(3)}" for s in row] for row in scores]
    singly = [majority_of(scores[i : i + 1], predictions[i : i + 1], 8, draws=200, seed=3).mean for i in range(300)]
    assert majority_of(scores, predictions, 8, draws=200, seed=3).mean == pytest.approx(np.mean(singly))


def test_majority_is_reproducible_and_depends_on_the_seed() -> None:
    predictions = [["a", "b", "b", "c"]]
    scores = np.array([[1.0, 0.0, 0.0, 0.0]])
    first, again, other = (majority_of(scores, predictions, 4, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_equals_the_share_of_subsets_with_a_correct_sample(k: int) -> None:
    rows = [[False] * 5, [True] + [False] * 4, [True, True, False, True, False], [True] * 5]
    expected = np.mean([[any(subset) for subset in itertools.combinations(row, k)] for row in rows], axis=1).mean()
    assert pass_at(np.array(rows), k) == pytest.approx(expected)


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="needs at least 3 samples"):
        pass_at(np.array([[True, False]]), 3)


def test_mean_and_deviation_are_taken_per_prompt() -> None:
    moments = mean_and_std(np.array([[0.0, 1.0], [1.0, 1.0]]))
    assert moments == (0.75, 0.25)


def test_draw_sizes_are_powers_of_two_and_the_number_of_samples() -> None:
    assert draw_sizes(1) == []
    assert draw_sizes(2) == [2]
    assert draw_sizes(8) == [2, 4, 8]
    assert draw_sizes(12) == [2, 4, 8, 12]
