"""Random numbers by counter, and tokens by inversion of the distribution function."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from rljob_trainer.rollout.sampling import draw, invert_cdf, uniforms


def splitmix64(state: int) -> int:
    """Steele, Lea, Flood 2014, in Python's integers."""
    mask = 2**64 - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_a_number_depends_on_seed_and_position_alone() -> None:
    table = uniforms([3, 2**63 + 5, -1], 50)
    golden = 0x9E3779B97F4A7C15
    for row, seed in enumerate([3, 2**63 + 5, 2**64 - 1]):
        for t in (0, 1, 49):
            expected = splitmix64(splitmix64(seed * golden + 1) + (t + 1) * golden) >> 40
            assert table[row, t] == expected / 2**24
    assert np.array_equal(uniforms([3], 7), table[:1, :7])


def test_numbers_are_uniform_and_unrelated() -> None:
    table = uniforms(range(400), 500)
    assert table.min() >= 0
    assert table.max() < 1
    assert stats.kstest(table.ravel(), "uniform").pvalue > 0.01
    neighbours = (
        np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1],
        np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1],
    )
    assert max(map(abs, neighbours)) < 4 / np.sqrt(table.size)


@pytest.mark.parametrize("vocabulary", [1, 2, 97, 256, 257, 1000, 4096, 20_001])
def test_inversion_finds_the_token_of_the_cumulative_sum(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    probabilities = torch.softmax(3 * torch.randn(40, vocabulary, generator=generator), -1)
    probabilities[:, ::3] = 0 if vocabulary > 3 else probabilities[:, ::3]
    uniform = torch.rand(40, generator=generator)
    tokens = invert_cdf(probabilities, uniform)
    exact = probabilities.double().cumsum(-1)
    below = exact.gather(1, tokens[:, None])[:, 0] - probabilities.gather(1, tokens[:, None])[:, 0]
    target = uniform.double() * exact[:, -1]
    slack = 2e-6
    assert bool(
        ((below - slack <= target) & (target <= below + probabilities.gather(1, tokens[:, None])[:, 0] + slack)).all()
    )
    assert bool((probabilities.gather(1, tokens[:, None]) > 0).all())


@pytest.mark.parametrize("vocabulary", [50, 300, 20_001])
def test_the_extremes_of_the_draw_still_give_possible_tokens(vocabulary: int) -> None:
    probabilities = torch.zeros(3, vocabulary)
    probabilities[0, vocabulary // 2] = 1
    probabilities[1, [1, vocabulary - 2]] = torch.tensor([0.1, 0.7])
    probabilities[2, 0] = 1e-30
    assert invert_cdf(probabilities, torch.zeros(3)).tolist() == [vocabulary // 2, 1, 0]
    almost_one = torch.full((3,), 1 - 2.0**-24)
    assert invert_cdf(probabilities, almost_one).tolist() == [vocabulary // 2, vocabulary - 2, 0]


def test_draws_follow_the_softmax_of_a_large_vocabulary() -> None:
    logits = 2 * torch.randn(700, generator=torch.Generator().manual_seed(1))
    uniform = torch.from_numpy(uniforms([11], 50_000)[0])
    tokens, log_probs = draw(logits.expand(50_000, -1).clone(), uniform, temperature=torch.full((50_000,), 1.3))
    expected = (logits.double() / 1.3).log_softmax(-1)
    np.testing.assert_allclose(log_probs, expected[tokens], atol=1e-5)
    counts, means = np.bincount(tokens, minlength=700), 50_000 * expected.exp().numpy()
    common = means >= 5
    observed, theory = np.append(counts[common], counts[~common].sum()), np.append(means[common], means[~common].sum())
    assert stats.chisquare(observed, theory).pvalue > 0.01
