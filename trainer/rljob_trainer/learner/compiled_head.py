"""Log-probs and entropy from logits in two programs of ``torch.compile``: one forward, one backward.

Operation by operation the softmax over a vocabulary of 152,000 reads or writes every logit fifteen times in float32:
with a model of 0.5B on an H200 that was 40 % of the device's time in scoring (gpu-check's part ``profile``). A program
reads the logits twice in the dtype in which the matrix product has left them, keeps the running maximum and sums of
each token in registers, and writes nothing but a few numbers a token; the gradient is one pass more.

``logprobs.py`` has the same mathematics for what is not compiled, and the chunks. All chunks share a program, since the
number of their tokens is a symbol to the compiler; a chunk of one token has its own, and so has a gradient of the
entropy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rljob_trainer.learner.compiled import allow_programs


class HeadStreams(NamedTuple):
    """Three numbers for each token ``[n]``, in float32 (in float64 from such logits)."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    normaliser: torch.Tensor
    """The logarithm of the sum of exp(z)."""


def streams(logits: torch.Tensor, targets: torch.Tensor, scale: float, cap: float | None) -> HeadStreams:
    """The log-prob of each of ``targets [n]`` and the entropy in nats, with z the capped and scaled ``logits [n, v]``.

    A log-prob of what is impossible (a logit of -inf) is the smallest number there is; it adds nothing to the entropy.
    """
    return HeadStreams(*_called(_streams, logits, [targets], scale, cap))


def gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    known: tuple[torch.Tensor, torch.Tensor],
    pulls: tuple[torch.Tensor, torch.Tensor | None],
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    """The gradient ``[n, v]`` of the logits, in their dtype. ``known``: entropy and normaliser ``[n]``; ``pulls``: the
    gradients of log-probs and entropy ``[n]`` (None: nothing depends on the entropy)."""
    grad: torch.Tensor = _called(_gradient, logits, [targets, *known, *pulls], scale, cap)
    return grad


def _called(
    code: Callable[..., Any],
    logits: torch.Tensor,
    vectors: Sequence[torch.Tensor | None],
    scale: float,
    cap: float | None,
) -> Any:
    """What the program of ``code`` gives. It gets copies of the ``vectors [n]``: a program is either for parts of other
    tensors or for whole ones."""
    own = [None if vector is None else vector.clone() for vector in vectors]
    for tensor in (logits, *own):
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    allow_programs()
    return _program(code)(logits, *own, scale, cap)


@functools.cache
def _program(code: Callable[..., Any]) -> Callable[..., Any]:
    compiler: Any = torch.compile
    compiled: Callable[..., Any] = compiler(code, fullgraph=True)
    return compiled


def _scaled(logits: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (z if cap is None else cap * torch.tanh(z / cap)) * scale


def _streams(
    logits: torch.Tensor, targets: torch.Tensor, scale: float, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    z = _scaled(logits, scale, cap)
    top = z.amax(1, keepdim=True)
    below = z - top
    parts = below.exp()
    total = parts.sum(1)
    along = torch.where(parts > 0, parts * below, 0.0).sum(1)
    log = total.log()
    normaliser = top[:, 0] + log
    log_probs = (z.gather(1, targets[:, None])[:, 0] - normaliser).clamp(min=torch.finfo(z.dtype).min)
    return log_probs, log - along / total, normaliser


def _gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    entropy: torch.Tensor,
    normaliser: torch.Tensor,
    of_log_probs: torch.Tensor,
    of_entropy: torch.Tensor | None,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    z = _scaled(logits, scale, cap)
    log_p = z - normaliser[:, None]
    p = log_p.exp()
    hit = torch.arange(z.shape[1], device=z.device)[None] == targets[:, None]
    slope = of_log_probs[:, None] * (hit.to(z.dtype) - p)
    if of_entropy is not None:
        # A probability too small for a number adds nothing, whatever its logarithm.
        slope = slope - of_entropy[:, None] * torch.where(p > 0, p * (log_p + entropy[:, None]), 0.0)
    slope = slope * scale
    if cap is not None:
        slope = slope * (1.0 - torch.tanh(logits.to(z.dtype) / cap).square())
    return slope.to(logits.dtype)
