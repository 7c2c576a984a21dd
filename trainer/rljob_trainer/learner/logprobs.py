"""Log-probs and entropy of given tokens from hidden states, in chunks: logits of many tokens never exist at once.

The output layer and the softmax are one autograd function. Logits are computed in the dtype of the weights and turned
into float32 (or kept in float64) for the softmax, ``chunk`` tokens at a time; the backward pass computes them again.
When all tokens fit into one chunk they are kept whole instead, which saves that third matrix product: on a CPU when all
logits take no more than 4 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_DEVICE_BYTES = 64 << 20
_KEPT_BYTES = 4 << 20
_CACHE_BYTES = 2 << 20
_FEWEST_TOKENS = 32
_LARGE_WEIGHT_BYTES = 32 << 20
_TOKENS_OF_A_LARGE_WEIGHT = 512


def default_chunk(tokens: int, weight: torch.Tensor) -> int:
    """Tokens whose float32 logits take 64 MiB on a GPU.

    A CPU is twice as fast when a chunk stays in its cache (2 MiB), unless all logits are few (4 MiB) and can be kept.
    An output layer that does not fit into that cache itself is read anew for every chunk: 512 tokens make up for it.
    """
    per_token = 4 * weight.shape[0]
    if weight.device.type != "cpu":
        return max(1, _DEVICE_BYTES // per_token)
    if tokens * per_token <= _KEPT_BYTES:
        return max(1, tokens)
    if weight.nbytes > _LARGE_WEIGHT_BYTES:
        return _TOKENS_OF_A_LARGE_WEIGHT
    return max(_FEWEST_TOKENS, _CACHE_BYTES // per_token)


def log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of ``targets [tokens]`` and entropy of their distributions in nats, each ``[tokens]`` float32.

    The distribution is ``softmax(hidden @ weight.T / temperature)`` with ``hidden [tokens, d]`` and
    ``weight [vocabulary, d]``. Both results are differentiable.
    """
    if temperature <= 0:
        raise ValueError(f"log-probs need a temperature above 0, but it is {temperature}")
    size = chunk or default_chunk(len(targets), weight)
    log_probs, entropy, _ = _head(hidden, weight, targets, 1.0 / temperature, size, False)
    return log_probs, entropy


@torch.no_grad()
def sum_squared_probs(
    hidden: torch.Tensor, weight: torch.Tensor, *, temperature: float = 1.0, chunk: int | None = None
) -> torch.Tensor:
    """The sum over the vocabulary of the squared probabilities, ``[tokens]`` (the optimal token baseline needs it)."""
    targets = hidden.new_zeros(hidden.shape[0], dtype=torch.int64)
    size = chunk or default_chunk(len(targets), weight)
    squared = _head(hidden, weight, targets, 1.0 / temperature, size, True)[2]
    assert squared is not None
    return squared


class _Head(torch.autograd.Function):
    """With z the scaled logits and p their softmax: dlogp/dz = onehot - p, dH/dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        chunk: int,
        squares: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        tokens = hidden.shape[0]
        precise = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.empty(tokens, dtype=precise, device=hidden.device)
        entropy = torch.empty_like(log_probs)
        squared = torch.empty_like(log_probs) if squares else None
        kept = None
        keep = tokens <= chunk and any(ctx.needs_input_grad[:2])
        room = _Room(hidden, weight, chunk, precise)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            log_p = room.log_softmax(hidden[part], weight, scale)
            log_probs[part] = log_p.gather(1, targets[part, None])[:, 0]
            p = torch.exp(log_p, out=room.other(log_p))
            if squared is not None:
                squared[part] = torch.linalg.vecdot(p, p)
            entropy[part] = -p.mul_(log_p).sum(1)
            if keep:
                kept = log_p
        ctx.save_for_backward(hidden, weight, targets, entropy, kept)
        ctx.scale, ctx.chunk = scale, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy, squared

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None, _: None) -> Any:
        hidden, weight, targets, entropy, kept = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None, None
        precise = entropy.dtype
        grad_hidden = torch.empty_like(hidden)
        several = hidden.shape[0] > ctx.chunk
        # Adding up chunks in half precision would lose what each adds: sum in float32.
        grad_weight = torch.zeros_like(weight, dtype=precise if several else weight.dtype)
        room = _Room(hidden, weight, ctx.chunk, precise)
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            # As few passes over [chunk, vocabulary] as can be: what is per token is worked out before.
            to_log_p = None if grad_log_probs is None else grad_log_probs[part, None] * ctx.scale
            if grad_entropy is None:
                assert to_log_p is not None
                p = room.softmax(hidden[part], weight, ctx.scale) if kept is None else kept.exp()
                grad = p.mul_(-to_log_p)
            else:
                log_p = kept if kept is not None else room.log_softmax(hidden[part], weight, ctx.scale)
                grad = torch.exp(log_p, out=room.other(log_p))
                to_entropy = grad_entropy[part, None] * ctx.scale
                shift = to_entropy * entropy[part, None]
                if to_log_p is not None:
                    shift += to_log_p
                # What is kept from the forward pass may be wanted again.
                factor = log_p.clone() if kept is not None else log_p
                grad.mul_(factor.mul_(-to_entropy).sub_(shift))
            if to_log_p is not None:
                grad.scatter_add_(1, targets[part, None], to_log_p)
            grad = grad.to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[part])
            if several and precise == weight.dtype:
                grad_weight.addmm_(grad.T, hidden[part])
            elif several:
                grad_weight += grad.T @ hidden[part]
            else:
                torch.mm(grad.T, hidden, out=grad_weight)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


_head: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = _Head.apply


class _Room:
    """Two matrices ``[chunk, vocabulary]`` that all chunks of a pass use in turn: fresh memory costs a CPU more time
    than the softmax."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, chunk: int, dtype: torch.dtype) -> None:
        shape = (min(chunk, hidden.shape[0]), weight.shape[0])
        self._one = torch.empty(shape, dtype=dtype, device=hidden.device)
        self._two = torch.empty_like(self._one)

    def log_softmax(self, hidden: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
        """``[n, vocabulary]``, until the next call; the smallest number there is for what is impossible (-inf)."""
        logits = self._logits(hidden, weight, scale)
        log_p = self._two[: hidden.shape[0]]
        return torch.log_softmax(logits, dim=-1, out=log_p).clamp_(min=torch.finfo(log_p.dtype).min)

    def softmax(self, hidden: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
        """``[n, vocabulary]``, until the next call."""
        return torch.softmax(self._logits(hidden, weight, scale), dim=-1, out=self._two[: hidden.shape[0]])

    def _logits(self, hidden: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
        logits = self._one[: hidden.shape[0]]
        if logits.dtype == hidden.dtype:
            torch.mm(hidden, weight.T, out=logits)
        else:
            logits.copy_(hidden @ weight.T)
        return logits.mul_(scale) if scale != 1.0 else logits

    def other(self, log_p: torch.Tensor) -> torch.Tensor:
        """The matrix in which ``log_p`` does not stand."""
        return self._one[: log_p.shape[0]]
