"""Attention over packed rows against transformers' own eager attention, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen
from transformers import AutoConfig, AutoModelForCausalLM

from rljob_trainer.learner.attention import Packed, Varlen, packed_attention
from rljob_trainer.learner.cpu.plain_layer import compute_in_rows
from rljob_trainer.learner.models import PackedRow, checkpoint_activations, load_critic, load_policy
from rljob_trainer.learner.packing import build_row
from rljob_trainer.learner.prefixes import Lengths, offsets_of
from rljob_trainer.learner.protocol import SequenceBatch

CPU = torch.device("cpu")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """``[H, L, D]`` by the definition, in the dtype of its inputs."""
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])[None]
    seen = (distance >= 0) & (distance < (window or q.shape[1]))
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ v


@pytest.mark.parametrize("outputs_only", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_the_definition_for_each_sequence(window: int | None, seed: int, outputs_only: bool) -> None:
    """Groups of one and of several, of equal and of different lengths; forward and backward, in float64."""
    rng = np.random.default_rng(seed)
    prompts = np.repeat(rng.integers(1, 9, 5), [1, 3, 4, 1, 2])
    keys = np.repeat(np.arange(5), [1, 3, 4, 1, 2])
    responses = rng.integers(0, 9, len(keys)) if seed else np.full(len(keys), 4)
    lengths = Lengths.of_groups(prompts, responses, keys)
    indices = rng.permutation(len(keys))
    row = build_row(lengths, indices, final=True)
    tokens, heads, kv, dim, scale = len(row.source), 4, 2, 8, 0.3
    q, k, v = (torch.randn(1, h, tokens, dim, dtype=torch.float64, requires_grad=True) for h in (heads, kv, kv))
    packed = Packed.of(row, CPU, torch.float64, outputs_only=outputs_only)
    out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, scaling=scale, sliding_window=window, packed=packed)
    if outputs_only:
        assert packed.last is not None
        every = out
        out, _ = packed_attention(
            torch.nn.Identity(), q, k, v, None, scaling=scale, sliding_window=window, packed=packed.last
        )
        read = torch.zeros(tokens, dtype=torch.bool)
        read[torch.from_numpy(row.last_rows)] = True
        torch.testing.assert_close(out, torch.where(read[:, None, None], every, 0), rtol=0, atol=1e-12)
    pull = torch.randn_like(out)

    # Each sequence's rows: its prompt's (perhaps a sibling's) and its own, found by what they stand for.
    starts = offsets_of(prompts + responses)
    of_row = {int(source): i for i, source in enumerate(row.source)}
    expected = torch.zeros_like(out)
    for s in range(len(keys)):
        places = []
        for t in range(int(prompts[s] + responses[s])):
            siblings = np.flatnonzero(keys == keys[s]) if t < prompts[s] else [s]
            places.append(next(of_row[int(starts[o] + t)] for o in siblings if int(starts[o] + t) in of_row))
        result = attention(q[0, :, places], k[0, :, places], v[0, :, places], scale, window)
        expected = expected.index_put((torch.zeros(1, dtype=torch.int64), torch.tensor(places)), result.transpose(0, 1))
    if outputs_only:
        expected = torch.where(read[:, None, None], expected, 0)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    ours = torch.autograd.grad(out, (q, k, v), pull)
    theirs = torch.autograd.grad(expected, (q, k, v), pull)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def segments(q: Any, k: Any, v: Any, starts: Any, key_starts: Any, scale: float, window: tuple[int, int]) -> Any:
    """What a variable-length flash kernel computes, ``[N, H, D]``: of each segment by itself, causal from its end."""
    parts = []
    for number in range(len(starts) - 1):
        own, keys = (slice(int(s[number]), int(s[number + 1])) for s in (starts, key_starts))
        missing = (keys.stop - keys.start) - (own.stop - own.start)
        query = torch.nn.functional.pad(q[own].transpose(0, 1), (0, 0, missing, 0))
        span = None if window[0] < 0 else window[0] + 1
        found = attention(query, k[keys].transpose(0, 1), v[keys].transpose(0, 1), scale, span)
        parts.append(found[:, missing:].transpose(0, 1))
    return torch.cat(parts)


def flash(q: Any, k: Any, v: Any, qs: Any, ks: Any, longest: int, longest_key: int, *,
          scale: float, window_size: tuple[int, int], enable_gqa: bool = False) -> Any:  # fmt: skip
    """As torch 2.13 has it."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return segments(q, k, v, qs, ks, scale, window_size)


def flash_without_groups(q: Any, k: Any, v: Any, qs: Any, ks: Any, longest: int, longest_key: int, *,
                         scale: float, window_size: tuple[int, int]) -> Any:  # fmt: skip
    """As torch 2.11 has it."""
    assert q.shape[1] == k.shape[1] == v.shape[1]
    return segments(q, k, v, qs, ks, scale, window_size)


@pytest.mark.parametrize("kernel", [flash, flash_without_groups])
@pytest.mark.parametrize(("kv", "window"), [(2, None), (2, 3), (4, None)])
def test_by_one_flash_call_it_is_what_blocks_compute(
    kv: int, window: int | None, kernel: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is played: torch's wants a GPU."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", kernel)
    prompts, keys = np.array([5, 5, 5, 7, 7, 4]), np.array([0, 0, 0, 1, 1, 2])
    row = build_row(Lengths.of_groups(prompts, np.array([3, 1, 6, 2, 5, 4]), keys), np.arange(6), final=True)
    tokens, heads, dim = len(row.source), 4, 8
    q, k, v = (torch.randn(1, h, tokens, dim, dtype=torch.float64, requires_grad=True) for h in (heads, kv, kv))
    by_blocks = Packed.of(row, CPU, torch.float64)
    by_flash = Packed([], Varlen.of(row.blocks, tokens))
    found, expected = (
        packed_attention(torch.nn.Identity(), q, k, v, None, scaling=0.3, sliding_window=window, packed=packed)[0]
        for packed in (by_flash, by_blocks)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    pull = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(out, (q, k, v), pull) for out in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("folder", ["tied_folder", "untied_folder"])
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("samples", [1, 4])
def test_a_packed_model_equals_one_sequence_at_a_time(
    folder: str, final: bool, samples: int, make_batch: Callable[..., SequenceBatch], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(folder)
    check_against_eager(path, make_batch(groups=24 // samples, samples=samples), final)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_windows_and_norms(family: str, tmp_path: Path, make_batch: Callable[..., SequenceBatch]) -> None:
    """Mistral with a sliding window; Qwen3's norms inside attention."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    extra = {"mistral": {"sliding_window": 5}, "qwen3": {"head_dim": 16}}
    config = AutoConfig.for_model(family, vocab_size=50, num_hidden_layers=2, **sizes, **extra[family])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    check_against_eager(tmp_path, make_batch(), final=False)


def test_the_critic_and_recomputed_activations(tied_folder: Path, make_batch: Callable[..., SequenceBatch]) -> None:
    """The same values and gradients whether the last layer leaves rows out or not."""
    batch = make_batch()
    row = build_row(Lengths.of(batch), np.arange(len(batch)), final=True)
    results = []
    for outputs_only in (False, True):
        critic = load_critic(tied_folder, dtype=torch.float32)
        torch.nn.init.constant_(critic.head.weight, 0.01)
        checkpoint_activations(critic.layers)
        packed = PackedRow.of(row, batch.token_ids, CPU, torch.float32, outputs_only=outputs_only)
        values, finals = critic(packed)
        assert finals is not None
        torch.cat([values, finals]).square().sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in critic.parameters() if p.grad is not None])
        results.append((values.detach(), finals.detach(), gradients))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def check_against_eager(path: Path, batch: SequenceBatch, final: bool) -> None:
    temperature = 0.8
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    starts = offsets_of(batch.prompt_lengths + batch.response_lengths)
    expected = []
    for s, prompt in enumerate(batch.prompt_lengths.tolist()):
        ids = torch.from_numpy(batch.token_ids[starts[s] : starts[s + 1]].astype(np.int64))
        log_p = torch.log_softmax(reference(ids[None], use_cache=False).logits[0].double() / temperature, -1)
        expected.append(log_p[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0])
    policy = load_policy(path, dtype=torch.float32)
    compute_in_rows(policy.layers)
    row = build_row(Lengths.of(batch), np.arange(len(batch)), final=final)
    assert policy.outputs_only
    packed = PackedRow.of(row, batch.token_ids, CPU, torch.float32, outputs_only=policy.outputs_only)
    log_probs = policy(packed, temperature).log_probs
    torch.testing.assert_close(log_probs.double(), torch.cat(expected), rtol=0, atol=1e-5)

    pull = torch.randn(len(log_probs), dtype=torch.float64)
    (log_probs * pull).sum().backward()
    (torch.cat(expected) * pull).sum().backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in policy.published():
        difference = parameter.grad - theirs[name].grad
        assert float(difference.norm()) < 1e-5 * max(float(theirs[name].grad.norm()), 1e-3), name


def test_the_live_model_still_works_the_usual_way(tied_folder: Path) -> None:
    """An engine may run the same model with padding and a mask of its own."""
    model = load_policy(tied_folder, dtype=torch.float32).language_model
    plain = AutoModelForCausalLM.from_pretrained(tied_folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)


def test_variants_that_are_not_computed_are_refused() -> None:
    x = torch.zeros(1, 1, 4, 8)
    module = torch.nn.Identity()
    with pytest.raises(ValueError, match="s_aux"):
        packed_attention(module, x, x, x, None, s_aux=torch.zeros(1), packed=Packed([], None))
    with pytest.raises(ValueError, match="only for packed rows"):
        packed_attention(module, x, x, x, None, softcap=30.0)
    with pytest.raises(ValueError, match="only for packed rows"):
        packed_attention(module, x, x, x, None, sliding_window=3)
    assert packed_attention(module, x, x, x, None, sliding_window=4)[0].shape == (1, 4, 1, 8)
    of_a_gpu = Packed([], Varlen(torch.zeros(2), torch.zeros(2), 1, 1, None))
    with pytest.raises(ValueError, match="described without one"):
        packed_attention(module, x, x, x, None, softcap=30.0, packed=of_a_gpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 3])
def test_capped_scores_on_a_gpu_are_those_of_float32(window: int | None) -> None:
    rng = np.random.default_rng(0)
    keys = np.repeat(np.arange(3), [1, 3, 4])
    lengths = Lengths.of_groups(np.repeat(rng.integers(1, 90, 3), [1, 3, 4]), rng.integers(0, 90, len(keys)), keys)
    row = build_row(lengths, np.arange(len(keys)))
    device = torch.device("cuda")
    q, k, v = (torch.randn(1, h, len(row.source), 64, dtype=torch.bfloat16, device=device) for h in (4, 2, 2))
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        packed = Packed.of(row, device, dtype, soft_capped=True)
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out, _ = packed_attention(torch.nn.Identity(), *inputs, None, sliding_window=window, softcap=2.0, packed=packed)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for half, whole in zip(*results, strict=True):
        assert float((half.float() - whole).norm() / whole.norm()) < 0.02


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 3])
def test_the_flash_kernel_on_a_gpu_equals_the_blocks(window: int | None) -> None:
    rng = np.random.default_rng(0)
    keys = np.repeat(np.arange(5), [1, 3, 4, 1, 2])
    lengths = Lengths.of_groups(
        np.repeat(rng.integers(1, 90, 5), [1, 3, 4, 1, 2]), rng.integers(0, 90, len(keys)), keys
    )
    row = build_row(lengths, np.arange(len(keys)))
    device = torch.device("cuda")
    q, k, v = (
        torch.randn(1, h, len(row.source), 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        for h in (4, 2, 2)
    )
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        packed = Packed.of(row, device, dtype)
        assert (packed.varlen is None) == (dtype == torch.float32)
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out, _ = packed_attention(torch.nn.Identity(), *inputs, None, sliding_window=window, packed=packed)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for flash, blocks in zip(*results, strict=True):
        assert float((flash.float() - blocks).norm() / blocks.norm()) < 0.02
