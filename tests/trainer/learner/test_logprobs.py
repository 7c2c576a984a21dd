"""Chunked log-probs and entropy against a plain float64 softmax, with gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rljob_trainer.learner import compiled_head, logprobs
from rljob_trainer.learner.logprobs import default_chunk, log_probs_and_entropy, sum_squared_probs

TOKENS, WIDTH, VOCABULARY = 23, 8, 31


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


@pytest.fixture(params=[False, True], ids=["as it is", "code of programs"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether what is otherwise compiled is used, which runs as it stands here."""
    monkeypatch.setattr(compiled_head, "_program", lambda code: code)
    return bool(request.param)


@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 1000, None])
@pytest.mark.parametrize(("temperature", "cap"), [(1.0, None), (0.6, None), (1.0, 2.0), (0.6, 3.0)])
@pytest.mark.parametrize("streams", ["both", "log_probs", "entropy"])
def test_equals_the_plain_softmax_and_its_gradient(
    compiled: bool, chunk: int | None, temperature: float, cap: float | None, streams: str
) -> None:
    hidden, weight, targets = problem(torch.float64)
    ours = log_probs_and_entropy(
        hidden, weight, targets, temperature=temperature, chunk=chunk, cap=cap, compiled=compiled
    )
    theirs = plain(hidden, weight, targets, temperature, cap)
    pulls = torch.randn(2, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if streams != "both":
        pulls[0 if streams == "entropy" else 1] = 0
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)

    def gradient(results: tuple[torch.Tensor, torch.Tensor], used: str) -> tuple[torch.Tensor, ...]:
        terms = {"log_probs": (results[0] * pulls[0]).sum(), "entropy": (results[1] * pulls[1]).sum()}
        loss = sum(terms.values()) if used == "both" else terms[used]
        return torch.autograd.grad(loss, (hidden, weight))

    for a, b in zip(gradient(ours, streams), gradient(theirs, "both"), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("chunk", [5, 1000])
def test_a_frozen_matrix_has_no_gradient_and_costs_none(compiled: bool, chunk: int) -> None:
    """It is not computed either: every product is with the matrix, none with the states."""
    hidden, weight, targets = problem(torch.float64)
    frozen = weight.detach()
    ours, _ = log_probs_and_entropy(hidden, frozen, targets, chunk=chunk, compiled=compiled)
    theirs, _ = plain(hidden, frozen, targets, 1.0)
    with FlopCounterMode(display=False) as counted:
        (gradient,) = torch.autograd.grad(ours.sum(), hidden)
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs.sum(), hidden)[0], rtol=0, atol=1e-11)
    # Logits once more unless probabilities were kept, and the gradient of the states.
    products = 1 if chunk > TOKENS and not compiled else 2
    assert counted.get_total_flops() == products * 2 * TOKENS * WIDTH * VOCABULARY


@pytest.mark.parametrize("kept", [0, 5, 10, TOKENS, 1000])
@pytest.mark.parametrize("streams", [[0], [1], [0, 1]], ids=["log_probs", "entropy", "both"])
def test_probabilities_of_the_first_chunks_are_kept(
    kept: int, streams: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of them: the gradients are those of the plain softmax, and may be asked for twice."""
    monkeypatch.setattr(logprobs, "default_chunk", lambda weight: 5)
    monkeypatch.setattr(logprobs, "_KEPT_BYTES", 4 * VOCABULARY * kept)
    hidden, weight, targets = problem(torch.float64)
    pulls = torch.randn(2, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(results[i] * pulls[i]).sum() for i in streams]).sum()

    expected = torch.autograd.grad(loss(plain(hidden, weight, targets, 0.7)), (hidden, weight))
    ours = loss(log_probs_and_entropy(hidden, weight, targets, temperature=0.7))
    for _ in range(2):
        for a, b in zip(torch.autograd.grad(ours, (hidden, weight), retain_graph=True), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_a_token_of_no_probability_has_no_gradient(compiled: bool) -> None:
    """e to the -200 is no float32; otherwise probabilities are kept here."""
    hidden = torch.ones(2, 1, requires_grad=True)
    weight = torch.tensor([[0.0], [1.0], [-200.0]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(hidden, weight, torch.tensor([0, 1]), compiled=compiled)
    ours = torch.autograd.grad((log_probs + entropy).sum(), (hidden, weight))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    theirs = torch.autograd.grad(torch.stack(plain(*exact, torch.tensor([0, 1]), 1.0)).sum(), exact)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_half_precision_weights_have_a_float32_softmax(compiled: bool, chunk: int, cap: float | None) -> None:
    hidden, weight, targets = problem(torch.bfloat16)
    log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, chunk=chunk, cap=cap, compiled=compiled)
    assert log_probs.dtype == entropy.dtype == torch.float32
    # The product rounds to bfloat16 (8 bits); what follows must not add more than float32 does.
    logits = (hidden @ weight.T).double()
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    torch.testing.assert_close(log_probs.double(), torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0])
    (log_probs.sum() + entropy.sum()).backward()
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    exact = plain(exact_hidden, exact_weight, targets, 1.0, cap)
    (exact[0].sum() + exact[1].sum()).backward()
    for ours, theirs in ((hidden, exact_hidden), (weight, exact_weight)):
        assert ours.grad is not None and theirs.grad is not None  # noqa: PT018
        assert ours.grad.dtype == torch.bfloat16
        assert float((ours.grad - theirs.grad).norm() / theirs.grad.norm()) < 0.02


def test_a_forbidden_token_has_no_entropy(compiled: bool) -> None:
    """A row of the output matrix that gives -inf, as some padded vocabularies do."""
    hidden, weight, targets = problem(torch.float32)
    with torch.no_grad():
        hidden[:, 0] = 1.0
        weight[3] = 0.0
        weight[3, 0] = -torch.inf
    targets = torch.where(targets == 3, 4, targets)
    kept = torch.cat([weight[:3], weight[4:]]).detach().double()
    shifted = torch.where(targets > 3, targets - 1, targets)
    ours = log_probs_and_entropy(hidden, weight, targets, compiled=compiled)
    theirs = plain(hidden.double(), kept, shifted, 1.0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5)
    barred = log_probs_and_entropy(hidden, weight, torch.full_like(targets, 3), compiled=compiled)[0]
    assert (barred == torch.finfo(torch.float32).min).all()


@pytest.mark.slow(
    stands_for=[
        "test_a_token_of_no_probability_has_no_gradient[code of programs]",
        "tests/trainer/learner/test_compiled.py::test_compiled_layers_have_the_scores_and_the_gradient_of_layers_as_they_are[gemma]",
    ]
)
def test_programs_give_what_their_code_gives() -> None:
    """In half precision, for chunks of several lengths, which share two programs. A forbidden word has no gradient."""
    _, _, targets = problem(torch.bfloat16)
    logits = torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(2)).bfloat16() * 4
    logits[:, 3] = -torch.inf
    targets = torch.where(targets == 3, 4, targets)
    pulls = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(3))
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (slice(0, 9), slice(0, TOKENS), slice(5, 8)):
        some, wanted = logits[rows], targets[rows]
        exact = torch.log_softmax(some.double(), -1).gather(1, wanted[:, None])[:, 0]
        found = compiled_head.streams(some, wanted, 1.0, None)
        torch.testing.assert_close(found.log_probs.double(), exact, rtol=0, atol=1e-5)
        for a, b in zip(found, compiled_head._streams(some, wanted, 1.0, None), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        known, both = (found.entropy, found.normaliser), (pulls[0, rows], pulls[1, rows])
        ours = compiled_head.gradient(some, wanted, known, both, 1.0, None)
        torch.testing.assert_close(ours, compiled_head._gradient(some, wanted, *known, *both, 1.0, None))
        assert ours.dtype == torch.bfloat16
        assert bool((ours[:, 3] == 0).all())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - made == 2


def test_the_sum_of_squared_probabilities() -> None:
    hidden, weight, _ = problem(torch.float64)
    expected = torch.softmax(hidden @ weight.T / 0.5, -1).square().sum(-1)
    for chunk in (3, 100):
        torch.testing.assert_close(sum_squared_probs(hidden, weight, temperature=0.5, chunk=chunk), expected)
    capped = torch.softmax(2.0 * torch.tanh(hidden @ weight.T / 2.0) / 0.5, -1).square().sum(-1)
    torch.testing.assert_close(sum_squared_probs(hidden, weight, temperature=0.5, chunk=3, cap=2.0), capped)


@pytest.mark.parametrize("cap", [None, 30.0])
def test_logits_never_exist_whole(compiled: bool, cap: float | None) -> None:
    """With a big vocabulary the largest allocation is one chunk's."""
    hidden = torch.randn(64, 4, requires_grad=True)
    weight = torch.randn(5000, 4, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.int64)
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
        log_probs, entropy = log_probs_and_entropy(hidden, weight, targets, chunk=8, cap=cap, compiled=compiled)
        (log_probs.sum() + entropy.sum()).backward()
    largest = max(abs(event.cpu_memory_usage) for event in profile.events())
    assert largest < 64 * 5000 * 4 / 2


def test_an_empty_stream_and_a_bad_temperature(compiled: bool) -> None:
    hidden, weight, targets = problem(torch.float32)
    log_probs, _ = log_probs_and_entropy(hidden[:0], weight, targets[:0], compiled=compiled)
    log_probs.sum().backward()
    assert weight.grad is not None
    assert float(weight.grad.abs().sum()) == 0.0
    with pytest.raises(ValueError, match="temperature above 0"):
        log_probs_and_entropy(hidden, weight, targets, temperature=0.0)


def test_chunks_fit_the_device() -> None:
    def layer(vocabulary: int, device: str, width: int = 8) -> torch.Tensor:
        return torch.empty(vocabulary, width, device=device)

    assert default_chunk(layer(4096, "cpu")) * 4096 * 4 <= 2 << 20
    assert default_chunk(layer(49152, "cpu", 576)) == 512  # the layer itself is larger than a cache


@pytest.mark.parametrize(
    ("gibibytes", "tokens"),
    [
        pytest.param(80, 1766, id="1 GiB is 2^30 / (4 * 151,936) tokens"),
        pytest.param(24, 662, id="a 64th of 24 GiB: 384 MiB"),
    ],
)
def test_a_chunk_on_a_gpu_is_as_large_as_its_memory_allows(
    gibibytes: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = SimpleNamespace(total_memory=gibibytes << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    weight = SimpleNamespace(shape=(151_936, 3584), device=torch.device("cuda", 0))
    assert default_chunk(weight) == tokens  # type: ignore[arg-type]
