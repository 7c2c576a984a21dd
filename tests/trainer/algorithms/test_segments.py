"""Sums, means and whitening over ragged sequences, against loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import oracle_advantages as oracle
import pytest
import torch
from hypothesis import given
from ragged import PRECISIONS, Ragged, agree, batches, make_batch, near

from rljob_trainer.algorithms import Segments, masked_mean, whiten
from rljob_trainer.algorithms import segments as segments_module
from rljob_trainer.algorithms.segments import keep_only_, kept_only


@pytest.mark.parametrize("dtype", PRECISIONS)
@given(batch=batches())
def test_reductions_over_kept_tokens(dtype: torch.dtype, batch: Ragged) -> None:
    segments, mask, stream = batch.segments, batch.mask, batch.stream("values", dtype)
    rows = batch.kept("values")
    near("segment sum", segments.sum(stream, mask), [math.fsum(row) for row in rows])
    near("segment mean", segments.mean(stream, mask), [math.fsum(row) / max(len(row), 1) for row in rows])
    assert segments.max(stream, mask).tolist() == [max(row, default=-math.inf) for row in rows]
    assert segments.count(mask).tolist() == [len(row) for row in rows]
    everything = [v for row in rows for v in row]
    near("masked mean", masked_mean(stream, mask), math.fsum(everything) / max(len(everything), 1))
    agree("whitening", whiten(stream, mask), batch, oracle.whiten(rows))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_whatever_stands_at_a_masked_token_becomes_0_and_the_others_keep_every_bit(
    dtype: torch.dtype, masked: bool
) -> None:
    values = torch.tensor([1.1, -0.0, math.inf, math.nan, -math.inf, 3e38, 1e-45, -2.5], dtype=dtype)
    for flip in (False, True):
        mask = torch.tensor([True, False] * 4) ^ flip if masked else torch.ones(8, dtype=torch.bool)
        expected = [value if keep else 0.0 for value, keep in zip(values.tolist(), mask.tolist(), strict=True)]
        for kept in (kept_only(values, mask), keep_only_(values.clone(), mask)):
            assert kept.dtype == dtype
            assert [repr(value) for value in kept.tolist()] == [repr(value) for value in expected]


@given(batch=batches())
def test_positions_spread_and_last_tokens(batch: Ragged) -> None:
    segments = batch.segments
    assert segments.positions.tolist() == [t for n in batch.lengths for t in range(n)]
    numbers = torch.arange(len(batch.lengths))
    assert segments.spread(numbers).tolist() == [i for i, n in enumerate(batch.lengths) for _ in range(n)]
    expected = [k and not any(row[t + 1 :]) for row in batch.keep for t, k in enumerate(row)]
    assert segments.is_last(batch.mask).tolist() == expected


def test_a_gradient_flows_through_sums_of_kept_tokens_only() -> None:
    segments = Segments.from_lengths([2, 0, 3])
    mask = torch.tensor([True, False, True, True, False])
    stream = torch.tensor([1.0, math.nan, 2.0, 3.0, math.nan], requires_grad=True)
    (segments.mean(stream, mask) * torch.tensor([10.0, 20.0, 30.0])).sum().backward()
    assert stream.grad is not None
    assert stream.grad.tolist() == [10.0, 0.0, 15.0, 15.0, 0.0]


def test_whitening_a_single_token_or_equal_tokens_gives_exactly_0() -> None:
    assert whiten(torch.tensor([3.7]), torch.tensor([True])).tolist() == [0.0]
    same = torch.full((7,), 0.1)
    assert whiten(same, torch.ones(7, dtype=torch.bool)).tolist() == [0.0] * 7


def rows_of(stream: torch.Tensor) -> list[list[float]]:
    return [stream.double().tolist()]


def only_the_first_sequence_is_rewarded() -> torch.Tensor:
    stream = torch.randn(100_000, generator=torch.Generator().manual_seed(3)) * 1e-3
    stream[:8] += 1
    return stream


def the_first_token_lies_300_sigma_away() -> torch.Tensor:
    stream = torch.randn(50_000, generator=torch.Generator().manual_seed(4))
    stream[0] = 300
    return stream


@pytest.mark.parametrize("make", [only_the_first_sequence_is_rewarded, the_first_token_lies_300_sigma_away])
@pytest.mark.parametrize("piece", [segments_module.PIECE_TOKENS, 20_000])
def test_whitening_in_float32_does_not_depend_on_which_token_comes_first(
    make: Callable[[], torch.Tensor], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "PIECE_TOKENS", piece)
    stream = make()
    there = torch.ones_like(stream, dtype=torch.bool)
    expected = oracle.whiten(rows_of(stream))[0]
    near("whitening (first token)", whiten(stream, there), expected)
    near("whitening (last token)", whiten(stream.flip(0), there), expected[::-1])

    behind = torch.cat([torch.full((3,), torch.nan), stream])
    mask = torch.cat([torch.zeros(3, dtype=torch.bool), there])
    near("whitening (first token, masked)", whiten(behind, mask)[3:], expected)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_whitening_equal_tokens_gives_exactly_0_in_several_pieces(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "PIECE_TOKENS", 7)
    same = torch.full((47,), 0.1, dtype=dtype)
    assert whiten(same, torch.ones(47, dtype=torch.bool)).tolist() == [0.0] * 47
    mask = torch.rand(47, generator=torch.Generator().manual_seed(0)) > 0.4
    assert whiten(same, mask).tolist() == [0.0] * 47


def test_building_segments() -> None:
    from_array = Segments.from_lengths(np.array([2, 0, 1]))  # type: ignore[arg-type]
    from_offsets = Segments.from_offsets(torch.tensor([0, 2, 2, 3]))
    for segments in (from_array, from_offsets):
        assert segments.offsets.tolist() == [0, 2, 2, 3]
        assert (len(segments), segments.tokens, segments.longest) == (3, 3, 2)
    assert len(Segments.from_lengths([])) == 0
    with pytest.raises(ValueError, match="negative"):
        Segments.from_lengths([1, -1])
    with pytest.raises(ValueError, match="begins with 0"):
        Segments.from_offsets(torch.tensor([1, 2]))


def test_batches_of_the_tests_themselves_hide_masked_tokens_from_the_oracle() -> None:
    batch = make_batch([2], [3, 4], 0.5, seed=3)
    assert [len(row) for row in batch.kept("values")] == [sum(row) for row in batch.keep]
    assert bool(batch.stream("values", torch.float64)[~batch.mask].isnan().all())
