"""Attention with a cap on its scores against the definition, whatever the pieces; its gradient against autograd's."""

from __future__ import annotations

import pytest
import torch

from rljob_trainer.models import soft_capping
from rljob_trainer.models.soft_capping import capped_attention, soft_capped

CAP, SCALE = 1.5, 0.7


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and scores; ``visible [B, Q, K]``."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = CAP * torch.tanh(SCALE * q @ k.transpose(2, 3) / CAP)
    return torch.softmax(scores.masked_fill(~visible[:, None], -torch.inf), -1) @ v, scores


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("case", ["causal", "later queries", "of several lengths"])
def test_values_and_gradients_by_the_definition(
    case: str, window: int | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, keys = (9, 9) if case == "causal" else (5, 11)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, 6, generator=generator, dtype=torch.float64).requires_grad_()
        for heads, length in ((4, queries), (2, keys), (2, keys))
    )
    first = {"causal": [0, 0], "later queries": [6, 6], "of several lengths": [2, 9]}[case]
    # The second sequence's last queries are padding, which sees what the last key does.
    places = (torch.tensor(first)[:, None] + torch.arange(queries)).clamp(max=keys - 1)
    distance = places[:, :, None] - torch.arange(keys)
    visible = (distance >= 0) & (distance < (window or keys))
    monkeypatch.setattr(soft_capping, "_SCORES", rows * 2 * 4 * keys)
    out = capped_attention(
        q,
        k,
        v,
        cap=CAP,
        scale=SCALE,
        window=window,
        seen=None if case == "causal" else places if case == "of several lengths" else places[:1],
        first=(first[0], first[1]),
    )
    expected, scores = by_definition(q, k, v, visible)
    assert float((scores.detach().abs() > 0.8 * CAP).double().mean()) > 0.1  # where the cap matters
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    pull = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), pull), torch.autograd.grad(expected, (q, k, v), pull), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_the_scores_of_all_queries_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soft_capping, "_SCORES", 1 << 14)
    q, k, v = (torch.randn(1, 2, 1024, 4, requires_grad=True) for _ in range(3))
    with torch.profiler.profile(profile_memory=True) as profile:
        capped_attention(q, k, v, cap=CAP, scale=SCALE).square().sum().backward()
    assert max(abs(event.cpu_memory_usage) for event in profile.events()) <= 4 * (1 << 14)


def test_half_precision_has_a_softmax_in_float32() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = capped_attention(q, k, v, cap=CAP, scale=SCALE)
    assert out.dtype == torch.bfloat16
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    causal = torch.ones(1, 40, 40, dtype=torch.bool).tril()
    expected, _ = by_definition(exact[0], exact[1], exact[2], causal)
    # Scores and probabilities are rounded to bfloat16 (8 bits) around the products.
    assert float((out.double() - expected).detach().norm() / expected.detach().norm()) < 0.02
    ours = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    theirs = torch.autograd.grad(expected.square().sum(), exact)
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 0.03


def test_a_capped_logit_stays_below_its_cap_and_is_not_rounded_to_half_precision() -> None:
    logits = torch.tensor([-1000.0, -3.0, 0.0, 0.5, 90.0], dtype=torch.bfloat16)
    capped = soft_capped(logits, 30.0)
    assert capped.dtype == torch.float32
    expected = 30.0 * torch.tanh(logits.double() / 30.0)
    torch.testing.assert_close(capped.double(), expected, rtol=1e-6, atol=0)
    assert soft_capped(logits, None) is logits
