"""Streams of a vocabulary that is divided among ranks, against a plain float64 softmax over all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed as dist

from rljob_trainer.algorithms.vocabulary_kl import chunked_kl
from rljob_trainer.learner.logprobs import log_probs_and_entropy, sum_squared_probs
from rljob_trainer.learner.tensor import TensorRanks
from rljob_trainer.learner.vocabulary import VocabularyPart

TOKENS, WIDTH, WORDS = 23, 8, 31
Tensors = dict[str, torch.Tensor]


def problem(case: str) -> tuple[torch.Tensor, ...]:
    """``far``: one rank has all of the probability, and of some tokens the target is another's."""
    generator = torch.Generator().manual_seed(0)
    hidden, ref_hidden = torch.randn(2, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight, ref_weight = torch.randn(2, WORDS, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(WORDS, (TOKENS,), generator=generator)
    if case == "far":
        hidden[:, 0], ref_hidden[:, 0] = 40.0, 30.0
        weight[:, 0] = ref_weight[:, 0] = 0.0
        weight[20:, 0] = ref_weight[20:, 0] = 8.0
    if case == "none":
        hidden, ref_hidden, targets = hidden[:0], ref_hidden[:0], targets[:0]
    return hidden, weight, ref_hidden, ref_weight, targets


def pulled(found: Tensors, streams: str) -> torch.Tensor:
    """A loss of those ``streams``, with a random weight for each token."""
    shape = (3, len(found["entropy"]))
    pulls = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    named = [(found[name] * pull).sum() for name, pull in zip(found, pulls, strict=True) if name in streams]
    return torch.stack(named).sum()


def divided(
    rank: int,
    address: str,
    count: int,
    case: str,
    dtype: torch.dtype,
    how: dict[str, Any],
    streams: str,
) -> Tensors:
    """Streams, and the gradients of states (a summand of each rank) and of this rank's words."""
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), count, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    assert dist.group.WORLD is not None
    ranks = TensorRanks(dist.group.WORLD, count, rank)
    part = VocabularyPart(ranks, WORDS)
    hidden, weight, ref_hidden, ref_weight, targets = (
        x.to(dtype) if x.is_floating_point() else x for x in problem(case)
    )
    hidden.requires_grad_()
    own = ranks.part(WORDS)
    weight, ref_weight = weight[own].clone().requires_grad_(), ref_weight[own].clone()
    entered = ranks.entering(hidden)
    how = {"temperature": 0.7, "part": part} | how
    log_probs, entropy = log_probs_and_entropy(entered, weight, targets, **how)
    chunk, cap = how["chunk"], how["cap"]

    def capped(x: torch.Tensor) -> torch.Tensor:
        return x if cap is None else cap * torch.tanh(x / cap)

    kl = chunked_kl(
        entered,
        lambda x: capped(x @ weight.T),
        ref_hidden,
        lambda x: capped(x @ ref_weight.T),
        temperature=0.7,
        chunk=chunk or 9,
        divergence=part.exact_kl,
    )
    found = {"log_probs": log_probs, "entropy": entropy, "kl": kl}
    loss = pulled(found, streams)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    squares = sum_squared_probs(hidden.detach(), weight.detach(), **how)
    found |= {"squares": squares, "hidden": hidden.grad, "weight": ranks.joined(weight.grad, 0, WORDS)}
    return {name: tensor.detach().double() for name, tensor in found.items()}


def whole(case: str, cap: float | None, streams: str) -> Tensors:
    hidden, weight, ref_hidden, ref_weight, targets = problem(case)
    hidden.requires_grad_()
    weight.requires_grad_()
    log_p, log_q = (
        torch.log_softmax((x if cap is None else cap * torch.tanh(x / cap)) / 0.7, -1)
        for x in (hidden @ weight.T, ref_hidden @ ref_weight.T)
    )
    p = log_p.exp()
    found = {
        "log_probs": log_p[torch.arange(len(targets)), targets],
        "entropy": -(p * log_p).sum(-1),
        "kl": (p * (log_p - log_q)).sum(-1),
    }
    loss = pulled(found, streams)
    grads = torch.autograd.grad(loss, (hidden, weight))
    found |= {"squares": p.square().sum(-1), "hidden": grads[0], "weight": grads[1]}
    return {name: tensor.detach() for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("count", "case", "chunk", "cap", "streams"),
    [
        (2, "near", None, None, "log_probs entropy kl"),
        (2, "near", 5, None, "log_probs"),
        (3, "near", 5, 2.0, "log_probs entropy kl"),
        (4, "near", TOKENS, None, "entropy"),
        (4, "near", 5, None, "log_probs entropy"),
        (4, "near", None, None, "kl"),
        (4, "far", 5, None, "log_probs entropy kl"),
        (2, "none", 5, None, "log_probs entropy kl"),
    ],
)
def test_streams_and_their_gradients_are_those_of_the_whole(
    count: int, case: str, chunk: int | None, cap: float | None, streams: str, ranks: Any
) -> None:
    """Of words that cannot be divided evenly."""
    expected = whole(case, cap, streams)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        if case == "far" and dtype == torch.float32:
            continue  # logits of 300 have but five digits behind the point
        for told in ranks.run(count, divided, count, case, dtype, {"chunk": chunk, "cap": cap}, streams):
            assert told.keys() == expected.keys()
            for name, value in expected.items():
                assert told[name].shape == value.shape
                assert float((told[name] - value).norm()) <= bound * float(value.norm()), name


def joined(rank: int, address: str, count: int) -> list[torch.Tensor]:
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), count, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    assert dist.group.WORLD is not None
    ranks = TensorRanks(dist.group.WORLD, count, rank)
    matrix = torch.arange(77.0).view(7, 11)
    return [
        ranks.joined(matrix[ranks.part(7)], 0, 7),
        ranks.joined(matrix[:, ranks.part(11)], 1, 11),
        ranks.joined(matrix[:, 0][ranks.part(7)].bfloat16(), 0, 7),
    ]


@pytest.mark.parametrize("count", [2, 4])
def test_uneven_parts_are_put_together(count: int, ranks: Any) -> None:
    matrix = torch.arange(77.0).view(7, 11)
    for rows, columns, vector in ranks.run(count, joined, count):
        assert torch.equal(rows, matrix)
        assert torch.equal(columns, matrix)
        assert torch.equal(vector, matrix[:, 0].bfloat16())
