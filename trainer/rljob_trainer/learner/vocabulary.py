"""Distributions over a vocabulary whose logits are divided among ranks (``tensor.py``).

No rank ever has a token's whole logits: ranks tell each other a few numbers of each token. With m the largest of a
rank's logits z of a token, these are m and

    s = sum of exp(z - m)      t = sum of exp(z - m) (z - m)      q = sum of exp(z - m)^2      z of the target, if there

from which the normaliser, the entropy and the squares of all follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rljob_trainer.learner.tensor import TensorRanks


class TokenFacts(NamedTuple):
    """What is computed from the whole distribution of each token, ``[tokens]``."""

    normaliser: torch.Tensor
    """The logarithm of the sum of exp(z)."""
    log_probs: torch.Tensor
    entropy: torch.Tensor
    squared: torch.Tensor


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The words that this rank has the logits of: as many as rows of its output matrix."""

    ranks: TensorRanks
    words: int
    """Of the whole vocabulary."""

    @property
    def longest(self) -> int:
        """The most words that any rank has: what is done in chunks has as many of them on all ranks."""
        return self.ranks.longest(self.words)

    def own(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where ``words`` stand among this rank's, 0 for those of others, and which are its own."""
        part = self.ranks.part(self.words)
        here = (words >= part.start) & (words < part.stop)
        return torch.where(here, words - part.start, 0), here

    def told(self, logits: torch.Tensor, own: torch.Tensor, here: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """``[5, n]``: what the others need of ``logits [n, v]``, which are overwritten. ``p [n, v]`` is filled with
        exp(z - m). ``own``, ``here`` are those of the targets."""
        lowest = torch.finfo(logits.dtype).min
        targets = torch.where(here, logits.gather(1, own[:, None])[:, 0], 0)
        # What is impossible is -inf, and may be all that a rank has.
        largest = logits.amax(1).clamp_(min=lowest)
        logits.sub_(largest[:, None]).clamp_(min=lowest)
        torch.exp(logits, out=p)
        along = torch.mul(p, logits, out=logits).sum(1)  # a product of its own would be a third matrix
        return torch.stack([largest, p.sum(1), along, torch.linalg.vector_norm(p, dim=1).square(), targets])

    def facts(self, told: torch.Tensor) -> TokenFacts:
        """From what each rank has ``told [5, tokens]``; a collective call. Worked out in float64, since an entropy is
        the difference of two larger numbers."""
        if not told.shape[1]:
            return TokenFacts(told[0], told[0], told[0], told[0])
        everyones = told.new_empty(self.ranks.size, *told.shape)
        dist.all_gather_single(everyones.view(-1, told.shape[1]), told.contiguous(), group=self.ranks.group)
        largest, total, along, squares, targets = everyones.double().unbind(1)
        top = largest.amax(0)
        gap = largest - top
        weight = gap.exp()
        normaliser = (weight * total).sum(0)
        # A weight of 0 has a gap whose product with it is 0, too.
        mean = (weight * (along + gap.clamp(min=-1e30) * total)).sum(0) / normaliser
        squared = (weight.square() * squares).sum(0) / normaliser.square()
        log = normaliser.log()
        lowest = torch.finfo(told.dtype).min
        facts = (top + log, (targets.sum(0) - top - log).clamp(min=lowest), log - mean, squared)
        return TokenFacts(*(fact.to(told.dtype) for fact in facts))

    def exact_kl(self, logits: torch.Tensor, ref_logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """``[n]``: the exact KL (``vocabulary_kl.exact_kl``) of ``[n, v]`` logits of this rank's words. A collective
        call; the policy's gradient flows into this rank's logits."""
        kl: torch.Tensor = _kl(logits, ref_logits, 1.0 / temperature, self.ranks.group)
        return kl


class _Kl(torch.autograd.Function):
    """With g = log p - log q: KL = sum of p g, and its derivative by the logit is p (g - KL)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ref_logits: torch.Tensor, scale: float, group: dist.ProcessGroup
    ) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        scaled = [(x.to(wide) * scale) for x in (logits, ref_logits)]
        top = torch.stack([x.amax(1) for x in scaled]).clamp_(min=torch.finfo(wide).min)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack([(x - m[:, None]).exp_().sum(1) for x, m in zip(scaled, top, strict=True)])
        dist.all_reduce(sums, group=group)
        log_p, log_q = (x - n[:, None] for x, n in zip(scaled, top + sums.log(), strict=True))
        p = log_p.exp()
        # A word that neither policy allows (both -inf) adds nothing.
        gap = torch.where(log_p == -torch.inf, 0, log_p - log_q)
        kl: torch.Tensor = torch.linalg.vecdot(p, gap)
        dist.all_reduce(kl, group=group)
        ctx.save_for_backward(gap.sub_(kl[:, None]).mul_(p))
        ctx.scale, ctx.dtype = scale, logits.dtype
        return kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (slopes,) = ctx.saved_tensors
        return (slopes * (grad[:, None] * ctx.scale)).to(ctx.dtype), None, None, None


_kl: Callable[..., torch.Tensor] = _Kl.apply
