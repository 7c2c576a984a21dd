"""Log-probs and entropy of given tokens from hidden states, in chunks: logits of many tokens never exist at once.

The output layer and the softmax are one autograd function (with ``trainer.compile`` another, whose passes over logits
are compiled: ``compiled_head.py``). Logits are computed in the dtype of the weights and turned
into float32 (or kept in float64) for the softmax, ``chunk`` tokens at a time; the backward pass computes them again.
Where probabilities are few they are kept for it instead, which saves that third matrix product: when all tokens fit
into one chunk, and on a CPU those of the first tokens, up to 16 MiB. Of capped logits none are kept: their gradient
needs more than probabilities.

Of a vocabulary that is divided among ranks each computes the logits of its own words, and learns from the others what
their sum is made of, once for all chunks (``vocabulary.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rljob_trainer.learner.compiled_head import gradient, streams
from rljob_trainer.learner.vocabulary import VocabularyPart

_DEVICE_SHARE = 64
"""Of a GPU's memory, one part in so many for the float32 logits of a chunk: three or four matrices of that size exist
at a time, and one more of capped logits."""
_MOST_DEVICE_BYTES = 1 << 30
"""More tokens make the matrix product no faster: 1,766 of a vocabulary of 152,000."""
_CACHE_BYTES = 2 << 20
_FEWEST_TOKENS = 32
_LARGE_WEIGHT_BYTES = 32 << 20
_TOKENS_OF_A_LARGE_WEIGHT = 512
_KEPT_BYTES = 16 << 20
"""More is fresh memory from the operating system each time, which costs more than the product that it saves."""


def device_chunk(vocabulary: int, memory: int) -> int:
    """Tokens whose float32 logits take a 64th of a GPU's ``memory`` bytes, and 1 GiB at most."""
    return max(1, min(_MOST_DEVICE_BYTES, memory // _DEVICE_SHARE) // (4 * vocabulary))


def default_chunk(weight: torch.Tensor, part: VocabularyPart | None = None) -> int:
    """On a GPU by its memory (``device_chunk``). ``part``: whose ``weight`` it is; all of its ranks have one answer.

    A CPU is twice as fast when a chunk stays in its cache (2 MiB). An output layer that does not fit into that cache
    itself is read anew for every chunk: 512 tokens make up for it.
    """
    words = weight.shape[0] if part is None else part.longest
    per_token = 4 * words
    if weight.device.type != "cpu":
        return device_chunk(words, torch.cuda.get_device_properties(weight.device).total_memory)
    if words * weight.shape[1] * weight.itemsize > _LARGE_WEIGHT_BYTES:
        return _TOKENS_OF_A_LARGE_WEIGHT
    return max(_FEWEST_TOKENS, _CACHE_BYTES // per_token)


def _kept_tokens(tokens: int, weight: torch.Tensor, chunk: int | None) -> int:
    """How many tokens' probabilities are kept for the backward pass: whole chunks. ``chunk``: what the caller gave."""
    size = chunk or default_chunk(weight)
    if tokens <= size:
        return tokens
    if chunk is not None or weight.device.type != "cpu":
        return 0
    return min(tokens, _KEPT_BYTES // (4 * weight.shape[0]) // size * size)


def log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    cap: float | None = None,
    part: VocabularyPart | None = None,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of ``targets [tokens]`` and entropy of their distributions in nats, each ``[tokens]`` float32.

    The distribution is ``softmax(hidden @ weight.T / temperature)`` with ``hidden [tokens, d]`` and
    ``weight [vocabulary, d]``; with a ``cap`` logits x are cap * tanh(x / cap) before they are divided by the
    temperature. Both results are differentiable. A ``chunk`` that is given bounds the memory: more than that many rows
    of probabilities never exist at once. ``part``: ``weight`` has those words alone; the gradient of ``hidden`` is then
    this rank's summand (``TensorRanks.entering``), and the call is a collective one. ``compiled``: by the programs of
    ``compiled_head.py``, for whole vocabularies. Raises ``ValueError`` for a temperature that is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"log-probs need a temperature above 0, but it is {temperature}")
    size = chunk or default_chunk(weight)
    if compiled:
        assert part is None, "layers that several ranks compute together are not compiled"
        return _compiled_head(hidden, weight, targets, 1.0 / temperature, cap, size)
    keep = 0 if cap is not None else _kept_tokens(len(targets), weight, chunk)
    log_probs, entropy, _ = _head(hidden, weight, targets, 1.0 / temperature, cap, size, keep, False, part)
    return log_probs, entropy


@torch.no_grad()
def sum_squared_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    cap: float | None = None,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """The sum over the vocabulary of the squared probabilities, ``[tokens]`` (the optimal token baseline needs it)."""
    targets = hidden.new_zeros(hidden.shape[0], dtype=torch.int64)
    size = chunk or default_chunk(weight)
    squared = _head(hidden, weight, targets, 1.0 / temperature, cap, size, 0, True, part)[2]
    assert squared is not None
    return squared


class _Head(torch.autograd.Function):
    """With z the scaled logits and p their softmax: dlogp/dz = onehot - p, dH/dz = -p (log p + H).

    Of capped logits z = scale cap tanh(x / cap), and dz/dx = scale (1 - tanh^2).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        cap: float | None,
        chunk: int,
        keep: int,
        squares: bool,
        part: VocabularyPart | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        tokens = hidden.shape[0]
        precise = torch.promote_types(hidden.dtype, torch.float32)
        keep = keep if any(ctx.needs_input_grad[:2]) else 0
        kept = torch.empty(keep, weight.shape[0], dtype=precise, device=hidden.device)
        room = _Room(hidden, weight, chunk, precise, cap)
        normaliser: torch.Tensor | None = None
        here: torch.Tensor | None = None
        squared: torch.Tensor | None = None
        if part is not None:
            targets, here = part.own(targets)
            told = torch.empty(5, tokens, dtype=precise, device=hidden.device)
            for start in range(0, tokens, chunk):
                rows = slice(start, start + chunk)
                logits = room.logits(hidden[rows], weight, scale)
                p = kept[rows] if start < keep else room.two(len(logits))
                told[:, rows] = part.told(logits, targets[rows], here[rows], p)
            normaliser, log_probs, entropy, squared = part.facts(told)
            kept.mul_((told[0] - normaliser)[:keep, None].exp_())
        else:
            log_probs = torch.empty(tokens, dtype=precise, device=hidden.device)
            entropy = torch.empty_like(log_probs)
            squared = torch.empty_like(log_probs) if squares else None
            for start in range(0, tokens, chunk):
                rows = slice(start, start + chunk)
                log_p = room.log_softmax(hidden[rows], weight, scale)
                log_probs[rows] = log_p.gather(1, targets[rows, None])[:, 0]
                p = torch.exp(log_p, out=kept[rows] if start < keep else room.other(log_p))
                if squared is not None:
                    squared[rows] = torch.linalg.vecdot(p, p)
                entropy[rows] = -torch.mul(p, log_p, out=log_p).sum(1)
        ctx.save_for_backward(hidden, weight, targets, entropy, kept, normaliser, here)
        ctx.scale, ctx.cap, ctx.chunk = scale, cap, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy, squared

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None, _: None) -> Any:
        hidden, weight, targets, entropy, kept, normaliser, here = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 9
        precise = entropy.dtype
        gradients = _Gradients(hidden, weight, ctx.chunk, ctx.needs_input_grad[1])
        room = _Room(hidden, weight, ctx.chunk, precise, ctx.cap, slopes=ctx.cap is not None)
        tiny = torch.finfo(precise).tiny
        for start in range(0, hidden.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            # As few passes over [chunk, vocabulary] as can be: what is per token is worked out before.
            to_log_p = None if grad_log_probs is None else grad_log_probs[rows, None] * ctx.scale
            of_log_p = None if to_log_p is None else -to_log_p
            known = None if normaliser is None else normaliser[rows]
            if grad_entropy is None:
                assert of_log_p is not None
                if start < len(kept):
                    grad = torch.mul(kept[rows], of_log_p, out=room.one(len(of_log_p)))
                else:
                    grad = room.softmax(hidden[rows], weight, ctx.scale, known).mul_(of_log_p)
            else:
                to_entropy = grad_entropy[rows, None] * ctx.scale
                shift = to_entropy * entropy[rows, None]
                if to_log_p is not None:
                    shift += to_log_p
                if start < len(kept):
                    p = kept[rows]
                    # A probability too small for a number adds nothing, whatever its logarithm.
                    log_p = torch.clamp(p, min=tiny, out=room.one(len(p))).log_()
                else:
                    log_p = room.log_softmax(hidden[rows], weight, ctx.scale, known)
                    p = torch.exp(log_p, out=room.other(log_p))
                grad = log_p.mul_(-to_entropy).sub_(shift).mul_(p)
            if to_log_p is not None:
                hit = to_log_p if here is None else torch.where(here[rows, None], to_log_p, 0)
                grad.scatter_add_(1, targets[rows, None], hit)
            if room.slopes is not None:
                grad.mul_(room.slopes[: len(grad)])
            gradients.add(rows, grad.to(weight.dtype))
        return *gradients.both(), *(None,) * 7


_head: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = _Head.apply


class _CompiledHead(torch.autograd.Function):
    """Log-probs and entropy by the programs of ``compiled_head.py``, with the gradient of ``_Head``. Of a chunk only
    its logits exist, as the matrix product has left them; the backward pass always computes them again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        cap: float | None,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        facts = torch.empty(3, len(targets), dtype=precise, device=hidden.device)
        for start in range(0, len(targets), chunk):
            rows = slice(start, start + chunk)
            facts[:, rows] = torch.stack(streams(hidden[rows] @ weight.T, targets[rows], scale, cap))
        log_probs, entropy, normaliser = facts.unbind(0)
        ctx.save_for_backward(hidden, weight, targets, entropy, normaliser)
        ctx.scale, ctx.cap, ctx.chunk = scale, cap, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        hidden, weight, targets, entropy, normaliser = ctx.saved_tensors
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 6
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(entropy)
        gradients = _Gradients(hidden, weight, ctx.chunk, ctx.needs_input_grad[1])
        for start in range(0, len(targets), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            pulls = grad_log_probs[rows], None if grad_entropy is None else grad_entropy[rows]
            known = entropy[rows], normaliser[rows]
            logits = hidden[rows] @ weight.T
            gradients.add(rows, gradient(logits, targets[rows], known, pulls, ctx.scale, ctx.cap))
        return *gradients.both(), *(None,) * 4


_compiled_head: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _CompiledHead.apply


class _Gradients:
    """Adds up the gradients of the hidden states and of the output matrix from those of the logits, chunk by chunk."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, chunk: int, is_trained: bool) -> None:
        """``is_trained``: whether the matrix is; one beside which an adapter is trained has no gradient."""
        self._hidden, self._weight = hidden, weight
        self._of_hidden = torch.empty_like(hidden)
        self._several = hidden.shape[0] > chunk
        # Adding up chunks in half precision would lose what each adds: sum in float32.
        dtype = torch.promote_types(weight.dtype, torch.float32) if self._several else weight.dtype
        self._of_weight = torch.zeros_like(weight, dtype=dtype) if is_trained else None

    def add(self, rows: slice, grad: torch.Tensor) -> None:
        """``grad [n, vocabulary]`` in the dtype of the matrix."""
        torch.mm(grad, self._weight, out=self._of_hidden[rows])
        if self._of_weight is None:
            return
        if not self._several:
            torch.mm(grad.T, self._hidden, out=self._of_weight)
        elif self._of_weight.dtype == grad.dtype:
            self._of_weight.addmm_(grad.T, self._hidden[rows])
        else:
            self._of_weight += grad.T @ self._hidden[rows]

    def both(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """For the states ``[tokens, d]`` and the matrix ``[vocabulary, d]`` (None: not trained), in their dtypes."""
        return self._of_hidden, None if self._of_weight is None else self._of_weight.to(self._weight.dtype)


class _Room:
    """Two matrices ``[chunk, vocabulary]`` that all chunks of a pass use in turn, and a third one for the ``slopes`` of
    a cap: fresh memory costs a CPU more time than the softmax."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        chunk: int,
        dtype: torch.dtype,
        cap: float | None,
        *,
        slopes: bool = False,
    ) -> None:
        shape = (min(chunk, hidden.shape[0]), weight.shape[0])
        self._one = torch.empty(shape, dtype=dtype, device=hidden.device)
        self._two = torch.empty_like(self._one)
        self._cap = cap
        self.slopes = torch.empty_like(self._one) if slopes else None
        """Of the last rows: the derivative of the capped logit by the logit."""

    def log_softmax(
        self, hidden: torch.Tensor, weight: torch.Tensor, scale: float, normaliser: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[n, vocabulary]``, until the next call; the smallest number there is for what is impossible (-inf).

        ``normaliser [n]``: the logarithm of the sum of all exp(logit), where the weight's words are not all.
        """
        logits = self.logits(hidden, weight, scale)
        log_p = self._two[: hidden.shape[0]]
        if normaliser is None:
            torch.log_softmax(logits, dim=-1, out=log_p)
        else:
            torch.sub(logits, normaliser[:, None], out=log_p)
        return log_p.clamp_(min=torch.finfo(log_p.dtype).min)

    def softmax(
        self, hidden: torch.Tensor, weight: torch.Tensor, scale: float, normaliser: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[n, vocabulary]``, until the next call."""
        logits = self.logits(hidden, weight, scale)
        if normaliser is None:
            return torch.softmax(logits, dim=-1, out=self._two[: hidden.shape[0]])
        return torch.sub(logits, normaliser[:, None], out=self._two[: hidden.shape[0]]).exp_()

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
        """``[n, vocabulary]``, capped and scaled, until the next call."""
        logits = self._one[: hidden.shape[0]]
        if logits.dtype == hidden.dtype:
            torch.mm(hidden, weight.T, out=logits)
        else:
            logits.copy_(hidden @ weight.T)
        if self._cap is not None:
            logits.div_(self._cap).tanh_()
            if self.slopes is not None:
                slopes = torch.mul(logits, logits, out=self.slopes[: hidden.shape[0]])
                slopes.neg_().add_(1.0)
            logits.mul_(self._cap)
        return logits.mul_(scale) if scale != 1.0 else logits

    def one(self, rows: int) -> torch.Tensor:
        """``[rows, vocabulary]`` of no meaning, to be written."""
        return self._one[:rows]

    def two(self, rows: int) -> torch.Tensor:
        """Such a one in which no logits stand."""
        return self._two[:rows]

    def other(self, log_p: torch.Tensor) -> torch.Tensor:
        """The matrix in which ``log_p`` does not stand."""
        return self._one[: log_p.shape[0]]
