"""Statistics of several samples per prompt: mean@n, best@k, worst@k, maj@k, pass@k. Pure NumPy, no I/O.

``best@k`` and its relatives ask what k samples would give, estimated from the n that were drawn: k are drawn from the
n with replacement. For the best and the worst that expectation has a closed form, used here; for the majority it is
estimated by seeded draws, which are the same for all prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

_NUMBERS_AT_ONCE = 1 << 22
"""Bounds the memory of the vote counts, draws x prompts x answers numbers, by taking some prompts at a time."""


class ScoreMoments(NamedTuple):
    """Mean and standard deviation over draws of k samples, each averaged over the prompts."""

    mean: float
    std: float


def draw_sizes(samples: int) -> list[int]:
    """The k of best@k: 2, 4, 8 ... below n, and n itself; none for a single sample."""
    if samples < 2:
        return []
    return [2**i for i in range(1, samples.bit_length()) if 2**i < samples] + [samples]


def mean_and_std(scores: Float64Array) -> ScoreMoments:
    """mean@n and std@n (population) of ``scores`` ``[P, N]``, averaged over the prompts."""
    return ScoreMoments(float(scores.mean()), float(scores.std(axis=1).mean()))


def best_of(scores: Float64Array, k: int) -> ScoreMoments:
    """The largest of k of a prompt's samples, ``scores`` ``[P, N]``.

    With x_(1) <= ... <= x_(n), the largest of k draws with replacement is x_(i) with probability
    (i/n)^k - ((i-1)/n)^k.
    """
    ordered = np.sort(scores, axis=1)
    n = scores.shape[1]
    weights = np.diff((np.arange(n + 1) / n) ** k)  # [N]
    return _moments(ordered @ weights, ordered**2 @ weights)


def worst_of(scores: Float64Array, k: int) -> ScoreMoments:
    """The smallest of k of a prompt's samples, ``scores`` ``[P, N]``."""
    mirrored = best_of(-scores, k)
    return ScoreMoments(0.0 - mirrored.mean, mirrored.std)  # not -mean: nothing is 0, and not -0


def majority_of(
    scores: Float64Array, predictions: Sequence[Sequence[str | None]], k: int, *, draws: int = 1000, seed: int = 42
) -> ScoreMoments:
    """The score of the answer that most of k of a prompt's samples give; ``scores`` ``[P, N]``, ``predictions`` alike.

    A sample without a prediction has no vote, unless no sample drawn has one. Among answers with equally many votes
    each is as likely. An answer's score is the mean over the samples that give it.
    """
    prompts, n = scores.shape
    rng = np.random.default_rng(seed)
    # times[b, i]: how often draw b takes sample i.
    times = rng.multinomial(k, np.full(n, 1.0 / n), size=draws).astype(np.float32)
    first, second = np.empty(prompts), np.empty(prompts)
    at_once = max(1, _NUMBERS_AT_ONCE // (max(draws, n) * n))
    for start in range(0, prompts, at_once):
        part = slice(start, min(start + at_once, prompts))
        gives, answered = _answers(predictions[part])  # [p, N, A], [p, A]
        count = gives.sum(axis=1)  # [p, A]
        used = np.maximum(count, 1.0)
        value = np.einsum("pn,pna->pa", scores[part], gives) / used
        square = np.einsum("pn,pna->pa", scores[part] ** 2, gives) / used
        # A vote for "no answer" weighs too little to beat one real vote.
        weight = np.where(answered, 1.0, 1.0 / (2 * k)).astype(np.float32)
        votes = np.einsum("bn,pna->bpa", times, gives.astype(np.float32), optimize=True) * weight
        winners = (votes == votes.max(axis=2, keepdims=True)).astype(np.float64)
        share = winners / winners.sum(axis=2, keepdims=True)  # [b, p, A]
        first[part] = np.einsum("bpa,pa->p", share, value) / draws
        second[part] = np.einsum("bpa,pa->p", share, square) / draws
    return _moments(first, second)


def pass_at(correct: npt.NDArray[np.bool_], k: int) -> float:
    """pass@k: the chance that at least one of k of a prompt's samples is correct; ``correct`` ``[P, N]``.

    Drawn without replacement: 1 - C(n - c, k) / C(n, k), the unbiased estimator of arXiv 2107.03374, equation 1.
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, and there are {n}")
    by_count = np.array([1.0 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)])
    return float(by_count[correct.sum(axis=1)].mean())


def _answers(predictions: Sequence[Sequence[str | None]]) -> tuple[Float64Array, npt.NDArray[np.bool_]]:
    """Which sample gives which of its prompt's answers, ``[p, N, A]``, and which answers are real ones, ``[p, A]``."""
    numbered = []
    for row in predictions:
        ids: dict[str | None, int] = {}
        numbered.append(([ids.setdefault(answer, len(ids)) for answer in row], list(ids)))
    most = max(len(ids) for _, ids in numbered)
    gives = np.eye(most)[np.array([row for row, _ in numbered])]
    answered = np.array([[i < len(ids) and ids[i] is not None for i in range(most)] for _, ids in numbered])
    return gives, answered


def _moments(first: Float64Array, second: Float64Array) -> ScoreMoments:
    """From each prompt's first and second moments, ``[P]``."""
    return ScoreMoments(float(first.mean()), float(np.sqrt(np.maximum(second - first**2, 0.0)).mean()))
