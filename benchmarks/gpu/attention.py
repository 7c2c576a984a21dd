"""The learner's packed attention in bfloat16 against each sequence's attention alone, in float32 and plain products.

Sequences share their prompts, as samples of a group do, so that gathered keys and their gradients are compared too.
Scores with a soft cap (Gemma 2) and float32 take other paths than the flash kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.figures import Writer
from rljob_trainer.learner.attention import Packed, attended
from rljob_trainer.learner.packing import Row, build_row
from rljob_trainer.learner.prefixes import Lengths

DIM = 64


@dataclass(frozen=True, slots=True)
class Kind:
    """Of a layer's attention."""

    heads: int
    kv_heads: int
    cap: float | None = None
    """Of scores (Gemma 2)."""
    window: int | None = None
    """Tokens that are seen, the asking one among them (Gemma 2 and 3, every other layer or five of six)."""


def measure(writer: Writer, device: str) -> None:
    """On a CPU attention is computed in float32, by blocks, and held against float64."""
    on_gpu = device == "cuda"
    half = torch.bfloat16 if on_gpu else torch.float32
    # On a GPU a float32 product is one only if TensorFloat-32 is off.
    torch.backends.cuda.matmul.allow_tf32 = False
    scale = 16 if on_gpu else 1
    lengths = _lengths(scale)
    row = build_row(lengths, np.arange(len(lengths.prompts)))
    # Shorter than most sequences, and than some prompts.
    window = 8 * scale
    for name, heads, kv_heads, cap, seen, dtype in (
        ("grouped heads", 14, 2, None, None, half),
        ("as many heads", 4, 4, None, None, half),
        ("capped scores", 8, 4, 2.0, None, half),
        ("sliding window", 4, 1, None, window, half),
        ("capped scores, sliding window", 8, 4, 2.0, window, half),
        ("float32, grouped heads", 14, 2, None, None, torch.float32),
        ("float32, sliding window", 4, 1, None, window, torch.float32),
    ):
        if not on_gpu and name.startswith("float32"):
            continue  # as the others are
        truth = torch.float64 if dtype == torch.float32 else torch.float32
        errors = _errors(row, lengths, Kind(heads, kv_heads, cap, seen), torch.device(device), dtype, truth)
        # Half a unit in the last place of bfloat16 is 2^-9 = 0.002; probabilities, sums and outputs are rounded each.
        bound = 0.02 if dtype == torch.bfloat16 else 1e-5
        for what, error in errors.items():
            writer.at_most(f"attention, {name}: {what}, relative error", error, bound)


def _lengths(scale: int) -> Lengths:
    """Two prompts with three responses each, two of which have their first half in common, and a sequence alone."""
    prompts = np.array([9, 9, 9, 13, 13, 13, 5]) * scale
    responses = np.array([7, 2, 11, 4, 6, 1, 8]) * scale
    return Lengths(prompts, responses, np.arange(7), np.array([0, 9, 9, 0, 13 + 3, 13, 0]) * scale)


def _errors(
    row: Row,
    lengths: Lengths,
    kind: Kind,
    device: torch.device,
    dtype: torch.dtype,
    truth: torch.dtype,
) -> dict[str, float]:
    """Of the output and the gradients of query, key and value: the norm of the difference over that of the truth."""
    generator = torch.Generator().manual_seed(0)
    tokens = len(row.source)
    heads = kind.heads
    shapes = {"query": heads, "key": kind.kv_heads, "value": kind.kv_heads}
    drawn = {name: torch.randn(tokens, n * DIM, generator=generator).to(device, dtype) for name, n in shapes.items()}
    upstream = torch.randn(tokens, heads * DIM, generator=generator).to(device, dtype)

    packed = Packed.of(row, device, dtype, soft_capped=kind.cap is not None)
    ours = {name: tensor.clone().requires_grad_() for name, tensor in drawn.items()}
    out = attended(packed, ours["query"], ours["key"], ours["value"], DIM, None, kind.window, kind.cap)
    out.backward(upstream)

    exact = {name: tensor.to(truth).requires_grad_() for name, tensor in drawn.items()}
    expected = _alone(exact, _segments(row, lengths), kind)
    expected.backward(upstream.to(truth))
    pairs = {"forward": (out.detach(), expected.detach())}
    for name in shapes:
        pairs[f"gradient of {name}"] = _grad(ours[name]), _grad(exact[name])
    return {name: float((a.to(truth) - b).norm() / b.norm()) for name, (a, b) in pairs.items()}


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _segments(row: Row, lengths: Lengths) -> list[np.ndarray]:
    """The rows of each sequence, in order: those of its tokens, or of the equal tokens of the one that has them too."""
    starts = np.concatenate([[0], np.cumsum(lengths.totals)])
    place = {int(source): index for index, source in enumerate(row.source)}
    segments = []
    for index, total in enumerate(lengths.totals.tolist()):
        rows = []
        for token in range(total - 1):  # the last one predicts nothing and is in no row
            owner = index
            while token < lengths.common[owner]:
                owner -= 1
            rows.append(place[int(starts[owner]) + token])
        segments.append(np.array(rows))
    return segments


def _alone(x: dict[str, torch.Tensor], segments: list[np.ndarray], kind: Kind) -> torch.Tensor:
    """Causal attention of each sequence by itself, with every product and sum written out, ``[N, heads * DIM]``."""
    out = torch.zeros_like(x["query"])
    heads, kv_heads, cap = kind.heads, kind.kv_heads, kind.cap
    for segment in segments:
        rows = torch.from_numpy(segment).to(out.device)
        query = x["query"][rows].view(len(segment), heads, DIM)
        key, value = (
            x[n][rows].view(len(segment), kv_heads, DIM).repeat_interleave(heads // kv_heads, 1)
            for n in ("key", "value")
        )
        scores = torch.einsum("qhd,khd->hqk", query, key) / DIM**0.5
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        hidden = torch.ones(len(segment), len(segment), dtype=torch.bool, device=out.device)
        # Of a window a query sees itself and what is less than that before it.
        hidden = hidden.triu(1) if kind.window is None else hidden.triu(1) | hidden.tril(-kind.window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        whole = torch.einsum("hqk,khd->qhd", weights, value).reshape(len(segment), -1)
        # Rows of a shared prompt are the same for all that share it.
        out = out.index_copy(0, rows, whole)
    return out
