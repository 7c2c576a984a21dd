"""Soft-capping as Gemma 2 has it (arXiv 2408.00118, section 2): a logit x becomes cap * tanh(x / cap).

Fused attention of torch knows no cap on its scores, so attention is written out here, a piece of the queries at a time:
the scores of all queries never exist at once, and keys that no query of a piece sees are left out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_SCORES = 1 << 21
"""Scores of a piece on a CPU: 8 MiB in float32, of which four exist at a time in the backward pass."""
_DEVICE_SCORES = 1 << 26


def soft_capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """``cap * tanh(logits / cap)`` in float32, or in float64 where the logits are; without a cap the logits."""
    if cap is None:
        return logits
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div(cap).tanh() * cap


def capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cap: float,
    scale: float,
    window: int | None = None,
    seen: torch.Tensor | None = None,
    first: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """``softmax(cap * tanh(scale * query @ key.T / cap)) @ value`` over the keys that each query sees.

    Query ``[B, H, Q, D]``, key and value ``[B, KV, K, D]``; returns ``[B, H, Q, D]``. Query i of sequence b sees the
    keys up to position ``seen[b, i]`` (``seen [B or 1, Q]``; None: up to i), and with a ``window`` no more than the
    last so many of these. ``first``: the least and the greatest position that a sequence's query 0 has; from there on
    positions rise by one, but not beyond the last key.
    """
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    most = _SCORES if query.device.type == "cpu" else _DEVICE_SCORES
    cut = _Cut(
        cap=cap,
        scale=scale,
        window=window,
        seen=seen,
        first=first,
        rows=max(1, most // (batch * heads * keys)),
    )
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, queries, dim)
    return _attend(grouped, key, value, cut).flatten(1, 2)


class _Piece(NamedTuple):
    """Some queries and the keys that any of them sees."""

    queries: slice
    keys: slice


@dataclass(frozen=True, slots=True)
class _Cut:
    """The arguments of ``capped_attention`` and how many queries make a piece."""

    cap: float
    scale: float
    window: int | None
    seen: torch.Tensor | None
    first: tuple[int, int]
    rows: int

    def pieces(self, queries: int, keys: int) -> Iterator[_Piece]:
        least, greatest = self.first
        for start in range(0, queries, self.rows):
            stop = min(start + self.rows, queries)
            begin = 0 if self.window is None else max(0, min(least + start, keys - 1) - self.window + 1)
            yield _Piece(slice(start, stop), slice(begin, min(keys, greatest + stop)))

    def probabilities(
        self, query: torch.Tensor, key: torch.Tensor, piece: _Piece
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The piece's queries ``[B, KV, G * n, D]`` and keys ``[B, KV, k, D]``, and for each pair ``[B, KV, G, n, k]``
        the probability and the hyperbolic tangent, in float32 or wider."""
        asking, asked = query[:, :, :, piece.queries], key[:, :, piece.keys]
        groups, rows = asking.shape[2:4]
        asking = asking.flatten(2, 3)
        tangent = (asking @ asked.transpose(2, 3)).unflatten(2, (groups, rows))
        tangent = tangent.to(torch.promote_types(query.dtype, torch.float32)).mul_(self.scale / self.cap).tanh_()
        scores = (tangent * self.cap).masked_fill_(~self._visible(piece, query.device), -torch.inf)
        return asking, asked, torch.softmax(scores, -1), tangent

    def _visible(self, piece: _Piece, device: torch.device) -> torch.Tensor:
        """``[B or 1, 1, 1, n, k]``."""
        if self.seen is None:
            last = torch.arange(piece.queries.start, piece.queries.stop, device=device)[None]
        else:
            last = self.seen[:, piece.queries]
        column = torch.arange(piece.keys.start, piece.keys.stop, device=device)
        visible = column <= last[:, :, None]
        if self.window is not None:
            visible &= column > last[:, :, None] - self.window
        return visible[:, None, None]


class _Attend(torch.autograd.Function):
    """With S the scaled products, T = tanh(S / cap), P = softmax(cap T) and O = P V: dS = P (dP - sum(dO O)) (1 - T^2).

    Probabilities are computed again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cut: _Cut) -> torch.Tensor:
        out = torch.empty_like(query)
        for piece in cut.pieces(query.shape[3], key.shape[2]):
            p = cut.probabilities(query, key, piece)[2].to(value.dtype)
            read = p.flatten(2, 3) @ value[:, :, piece.keys]
            out[:, :, :, piece.queries] = read.unflatten(2, p.shape[2:4])
        ctx.save_for_backward(query, key, value, out)
        ctx.cut = cut
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out = ctx.saved_tensors
        cut: _Cut = ctx.cut
        wide = torch.promote_types(query.dtype, torch.float32)
        to_query = torch.empty_like(query)
        to_key, to_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        along = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        for piece in cut.pieces(query.shape[3], key.shape[2]):
            asking, asked, p, tangent = cut.probabilities(query, key, piece)
            pull = grad[:, :, :, piece.queries].flatten(2, 3)
            to_value[:, :, piece.keys] += p.to(value.dtype).flatten(2, 3).transpose(2, 3) @ pull
            to_p = (pull @ value[:, :, piece.keys].transpose(2, 3)).unflatten(2, p.shape[2:4]).to(wide)
            to_scores = to_p.sub_(along[:, :, :, piece.queries]).mul_(p)
            to_scores.mul_(tangent.square_().neg_().add_(1.0)).mul_(cut.scale)
            flat = to_scores.to(query.dtype).flatten(2, 3)
            to_query[:, :, :, piece.queries] = (flat @ asked).unflatten(2, p.shape[2:4])
            to_key[:, :, piece.keys] += flat.transpose(2, 3) @ asking
            del p, tangent, to_p, to_scores, flat  # or they would be there beside the next piece's
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), None


_attend: Callable[..., torch.Tensor] = _Attend.apply
