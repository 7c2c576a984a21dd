"""The learner's packed attention in bfloat16 against each sequence's attention alone, in float32 and plain products.

Sequences share their prompts, as samples of a group do, so that gathered keys and their gradients are compared too.
Scores with a soft cap (Gemma 2) take another path than the flash kernel.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.gpu.figures import Writer
from rljob_trainer.learner.attention import Packed, attended
from rljob_trainer.learner.packing import Lengths, Row, build_row

DIM = 64


def measure(writer: Writer, device: str) -> None:
    """On a CPU attention is computed in float32, by blocks, and held against float64."""
    on_gpu = device == "cuda"
    dtype, truth = (torch.bfloat16, torch.float32) if on_gpu else (torch.float32, torch.float64)
    # On a GPU a float32 product is one only if TensorFloat-32 is off.
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, heads, kv_heads, cap in (
        ("grouped heads", 14, 2, None),
        ("as many heads", 4, 4, None),
        ("capped scores", 8, 4, 2.0),
    ):
        lengths = _lengths(scale=16 if on_gpu else 1)
        row = build_row(lengths, np.arange(len(lengths.prompts)))
        errors = _errors(row, lengths, heads, kv_heads, cap, torch.device(device), dtype, truth)
        # Half a unit in the last place of bfloat16 is 2^-9 = 0.002; probabilities, sums and outputs are rounded each.
        bound = 0.02 if on_gpu else 1e-5
        for what, error in errors.items():
            writer.at_most(f"attention, {name}: {what}, relative error", error, bound)


def _lengths(scale: int) -> Lengths:
    """Two prompts with three responses each and a sequence alone."""
    prompts = np.array([9, 9, 9, 13, 13, 13, 5]) * scale
    responses = np.array([7, 2, 11, 4, 6, 1, 8]) * scale
    return Lengths(prompts, responses, np.array([0, 0, 0, 1, 1, 1, 2]))


def _errors(
    row: Row,
    lengths: Lengths,
    heads: int,
    kv_heads: int,
    cap: float | None,
    device: torch.device,
    dtype: torch.dtype,
    truth: torch.dtype,
) -> dict[str, float]:
    """Of the output and the gradients of query, key and value: the norm of the difference over that of the truth."""
    generator = torch.Generator().manual_seed(0)
    tokens = len(row.source)
    shapes = {"query": heads, "key": kv_heads, "value": kv_heads}
    drawn = {name: torch.randn(tokens, n * DIM, generator=generator).to(device, dtype) for name, n in shapes.items()}
    upstream = torch.randn(tokens, heads * DIM, generator=generator).to(device, dtype)

    packed = Packed.of(row, device, dtype, soft_capped=cap is not None)
    ours = {name: tensor.clone().requires_grad_() for name, tensor in drawn.items()}
    out = attended(packed, ours["query"], ours["key"], ours["value"], DIM, None, None, cap)
    out.backward(upstream)

    exact = {name: tensor.to(truth).requires_grad_() for name, tensor in drawn.items()}
    expected = _alone(exact, _segments(row, lengths), heads, kv_heads, cap)
    expected.backward(upstream.to(truth))
    pairs = {"forward": (out.detach(), expected.detach())}
    for name in shapes:
        pairs[f"gradient of {name}"] = _grad(ours[name]), _grad(exact[name])
    return {name: float((a.to(truth) - b).norm() / b.norm()) for name, (a, b) in pairs.items()}


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _segments(row: Row, lengths: Lengths) -> list[np.ndarray]:
    """The rows of each sequence, in order: those of its tokens, or of the equal tokens of a prompt that it shares."""
    starts = np.concatenate([[0], np.cumsum(lengths.prompts + lengths.responses)])
    place = {int(source): index for index, source in enumerate(row.source)}
    first = {int(key): index for index, key in reversed(list(enumerate(lengths.keys)))}
    segments = []
    for index, (prompt, response) in enumerate(zip(lengths.prompts, lengths.responses, strict=True)):
        shared = starts[first[int(lengths.keys[index])]]
        own = starts[index]
        # The last response token predicts nothing and is in no row.
        sources = [*range(shared, shared + prompt), *range(own + prompt, own + prompt + response - 1)]
        segments.append(np.array([place[int(source)] for source in sources]))
    return segments


def _alone(
    x: dict[str, torch.Tensor], segments: list[np.ndarray], heads: int, kv_heads: int, cap: float | None
) -> torch.Tensor:
    """Causal attention of each sequence by itself, with every product and sum written out, ``[N, heads * DIM]``."""
    out = torch.zeros_like(x["query"])
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
        hidden = torch.ones(len(segment), len(segment), dtype=torch.bool, device=out.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        whole = torch.einsum("hqk,khd->qhd", weights, value).reshape(len(segment), -1)
        # Rows of a shared prompt are the same for all that share it.
        out = out.index_copy(0, rows, whole)
    return out
