"""The scan against the plain loop it replaces: lengths around its block size, long sequences, any decay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.algorithms import AdvantageInputs, Segments, advantages, scan
from rljob_trainer.algorithms.scan import discounted_sum


def loop(stream: torch.Tensor, decay: float, lengths: list[int], mask: torch.Tensor) -> torch.Tensor:
    values, kept, result, start = stream.double().tolist(), mask.tolist(), [0.0] * stream.numel(), 0
    for length in lengths:
        running = 0.0
        for t in reversed(range(start, start + length)):
            if kept[t]:
                running = values[t] + decay * running
                result[t] = running
        start += length
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("decay", [1.0, 0.95, 1e-6, 0.0])
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 129, 300]), max_size=5),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_lengths_around_a_block(dtype: torch.dtype, decay: float, lengths: list[int], masked: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    stream = torch.randn(sum(lengths), generator=random, dtype=dtype)
    mask = torch.rand(sum(lengths), generator=random) >= masked
    result = discounted_sum(torch.where(mask, stream, torch.nan), decay, Segments.from_lengths(lengths), mask)
    expected = loop(stream, decay, lengths, mask)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_device_that_is_not_waited_for_keeps_the_discount_s_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch for GPUs, here on the CPU: borders in the middle of blocks, at their ends, and one after the other."""
    monkeypatch.setattr(scan, "_waits_for_nothing", lambda device: False)
    lengths = [5, 27, 16, 1, 1, 0, 70, 300, 3]
    stream = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    for decay in (0.95, 0.9, 0.99):
        result = discounted_sum(stream, decay, Segments.from_lengths(lengths), mask)
        torch.testing.assert_close(result, loop(stream, decay, lengths, mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [1.0, 0.9999, 0.95])
def test_float32_keeps_its_digits_over_eight_thousand_tokens(decay: float) -> None:
    lengths = [8192, 1, 4097, 0, 8192]
    random = torch.Generator().manual_seed(0)
    stream = torch.randn(sum(lengths), generator=random)
    mask = torch.rand(sum(lengths), generator=random) > 0.1
    expected = loop(stream, decay, lengths, mask)
    error = (discounted_sum(stream, decay, Segments.from_lengths(lengths), mask) - expected).abs()
    assert float((error / expected.abs().clamp(min=1)).max()) < 1e-6


def test_gae_of_long_responses_keeps_its_digits_with_lambda_and_gamma_1() -> None:
    """A_t = (sum of the rewards from t on) - V_t then; the sum of 8,192 temporal differences would lose four digits."""
    lengths = [8192, 5000]
    random = torch.Generator().manual_seed(1)
    values = 3 + torch.randn(sum(lengths), generator=random)
    rewards = torch.randn(sum(lengths), generator=random) * 0.01
    mask = torch.ones(sum(lengths), dtype=torch.bool)
    expected = loop(rewards, 1.0, lengths, mask) - values.double()
    inputs = AdvantageInputs(mask=mask, segments=Segments.from_lengths(lengths), rewards=rewards, values=values)
    error = (advantages("gae", inputs, whiten=False).advantages - expected).abs()
    assert float((error / expected.abs().clamp(min=1)).max()) < 1e-6


def test_many_levels_of_blocks() -> None:
    """300,000 tokens are 18,751 blocks of 16, which are 293 of 64, which are 5, which are 1."""
    stream = torch.randn(300_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mask = torch.ones(300_000, dtype=torch.bool)
    result = discounted_sum(stream, 1.0, Segments.from_lengths([300_000]), mask)
    torch.testing.assert_close(result, stream.flip(0).cumsum(0).flip(0), rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("decay", [-0.1, 1.1])
def test_a_decay_outside_0_and_1_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        discounted_sum(torch.ones(1), decay, Segments.from_lengths([1]), torch.ones(1, dtype=torch.bool))
