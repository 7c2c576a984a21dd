"""The exact KL over the vocabulary against a loop, and in chunks against itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from differences import finite_differences, same_slopes
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import PRECISIONS, Rows, near

from rljob_trainer.algorithms import chunked_kl, exact_kl


def by_hand(logits: list[float], reference: list[float], temperature: float) -> float:
    """sum of p (log p - log q); tokens that the policy does not allow (-inf) add nothing."""

    def log_softmax(row: list[float]) -> list[float]:
        top = max(row)
        total = math.log(math.fsum(math.exp((x - top) / temperature) for x in row))
        return [(x - top) / temperature - total for x in row]

    pairs = zip(log_softmax(logits), log_softmax(reference), strict=True)
    return math.fsum(math.exp(p) * (p - q) for p, q in pairs if p > -math.inf)


@st.composite
def pairs_of_logits(draw: st.DrawFn, rows: int = 3) -> tuple[list[list[float]], list[list[float]]]:
    """Of the policy and of the reference, which allows whatever the policy allows."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size, width = draw(st.integers(1, 12)), draw(st.sampled_from([0.1, 1.0, 20.0]))
    logits, reference = random.normal(0, width, (2, rows, size)).astype(np.float32)
    forbidden = draw(st.sampled_from([0.0, 0.4]))
    for row, other in zip(logits, reference, strict=True):
        gone = random.random(size) < forbidden
        gone[random.integers(size)] = False
        row[gone] = -np.inf
        other[gone & (random.random(size) < 0.5)] = -np.inf
    return logits.tolist(), reference.tolist()


@pytest.mark.parametrize("dtype", PRECISIONS, ids=["float64", "float32"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@given(pair=pairs_of_logits())
def test_exact_kl(dtype: torch.dtype, temperature: float, pair: tuple[Rows, Rows]) -> None:
    logits, reference = (torch.tensor(rows, dtype=dtype) for rows in pair)
    expected = [by_hand(a, b, temperature) for a, b in zip(*pair, strict=True)]
    near("exact kl", exact_kl(logits, reference, temperature), expected)
    near("exact kl of equals", exact_kl(logits, logits, temperature), [0.0] * len(expected))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@settings(max_examples=10)
@given(pair=pairs_of_logits(rows=2))
def test_the_gradient_of_the_exact_kl(temperature: float, pair: tuple[Rows, Rows]) -> None:
    def total(rows: Rows) -> float:
        return math.fsum(by_hand(a, b, temperature) for a, b in zip(rows, pair[1], strict=True))

    logits, reference = (torch.tensor(rows, dtype=torch.float64).requires_grad_() for rows in pair)
    exact_kl(logits, reference, temperature).sum().backward()
    assert logits.grad is not None
    assert reference.grad is None
    same_slopes("gradient of the exact kl", logits.grad.flatten(), finite_differences(pair[0], total))


def test_tokens_that_no_policy_allows_add_nothing() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    reference = torch.tensor([[1.0, 0.0, -math.inf]])
    torch.testing.assert_close(exact_kl(logits, reference), exact_kl(logits[:, :2], reference[:, :2]))


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_change_neither_value_nor_gradient(chunk: int) -> None:
    random = torch.Generator().manual_seed(2)
    hidden, ref_hidden = (torch.randn(7, 5, generator=random, dtype=torch.float64) for _ in range(2))
    head, ref_head = (torch.randn(13, 5, generator=random, dtype=torch.float64) for _ in range(2))
    hidden.requires_grad_()
    head.requires_grad_()

    def gradients(kl: torch.Tensor) -> list[torch.Tensor]:
        return [kl.detach(), *torch.autograd.grad((kl * torch.arange(7.0)).sum(), [hidden, head])]

    whole = gradients(exact_kl(hidden @ head.T, ref_hidden @ ref_head.T, 0.8))
    pieces = gradients(
        chunked_kl(hidden, lambda h: h @ head.T, ref_hidden, lambda h: h @ ref_head.T, temperature=0.8, chunk=chunk)
    )
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b)


def test_no_tokens_and_no_chunk() -> None:
    nothing = torch.zeros(0, 5)
    assert chunked_kl(nothing, lambda h: h, nothing, lambda h: h).shape == (0,)
    with pytest.raises(ValueError, match="at least one token"):
        chunked_kl(nothing, lambda h: h, nothing, lambda h: h, chunk=0)
