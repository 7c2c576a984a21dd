"""The exact KL over the vocabulary against a loop, and in chunks against itself."""

from __future__ import annotations

import math

import pytest
import torch

from rljob_trainer.algorithms import chunked_kl, exact_kl


def by_hand(logits: list[float], reference: list[float], temperature: float) -> float:
    def softmax(row: list[float]) -> list[float]:
        weights = [math.exp(x / temperature) for x in row]
        return [w / math.fsum(weights) for w in weights]

    return math.fsum(p * math.log(p / q) for p, q in zip(softmax(logits), softmax(reference), strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_exact_kl(temperature: float) -> None:
    random = torch.Generator().manual_seed(0)
    logits, reference = (torch.randn(6, 11, generator=random, dtype=torch.float64) for _ in range(2))
    expected = [by_hand(a, b, temperature) for a, b in zip(logits.tolist(), reference.tolist(), strict=True)]
    torch.testing.assert_close(exact_kl(logits, reference, temperature), torch.tensor(expected, dtype=torch.float64))
    assert exact_kl(logits, logits).abs().max().item() < 1e-15


def test_tokens_that_no_policy_allows_add_nothing() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    reference = torch.tensor([[1.0, 0.0, -math.inf]])
    torch.testing.assert_close(exact_kl(logits, reference), exact_kl(logits[:, :2], reference[:, :2]))


def test_the_gradient_is_that_of_the_divergence_and_the_reference_has_none() -> None:
    """d KL / d logits_v = pi_v (log pi_v - log pi_ref_v - KL)."""
    random = torch.Generator().manual_seed(1)
    logits, reference = (torch.randn(4, 7, generator=random, dtype=torch.float64).requires_grad_() for _ in range(2))
    exact_kl(logits, reference).sum().backward()
    with torch.no_grad():
        p, q = torch.log_softmax(logits, -1), torch.log_softmax(reference, -1)
        expected = p.exp() * (p - q - exact_kl(logits, reference)[:, None])
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected)
    assert reference.grad is None


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
