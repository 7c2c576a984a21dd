"""Muon's rule for matrices: momentum, of which only the directions count (Jordan et al. 2024; arXiv:2502.16982).

    M <- mu M + (1 - mu) G                  momentum
    O  = orthogonal(mu M + (1 - mu) G)      Nesterov's look ahead, with all singular values near 1
    W <- W - rate (0.2 sqrt(max(rows, columns)) O + decay W)

With the factor 0.2 sqrt(max) a step is about as large as one of AdamW, so both share one learning rate and one weight
decay (arXiv:2502.16982, equation 4). Orthogonalisation needs whole matrices: sharded ones are gathered, each rank
computes all of them and keeps its part. That is one gathering of the matrices a step, as in a forward pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.moves import Resting
from rljob_trainer.learner.settings import OptimizerSettings

MOMENTUM = 0.95
"""As published for every size; nobody tunes it."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic whose repetition brings singular values near 1 fastest (Jordan et al. 2024)."""
_ITERATIONS = 5


class Muon:
    """For parameters of two dimensions, and for stacks of matrices (experts), which have three."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], settings: OptimizerSettings, layout: Layout) -> None:
        self.settings, self._layout = settings, layout
        self._parameters = list(parameters)
        self._momentum = [torch.zeros_like(layout.local(parameter.detach())) for parameter in self._parameters]
        self._resting = Resting()

    @torch.no_grad()
    def apply(self, chosen: Sequence[int], gradients: Sequence[torch.Tensor], rate: float) -> None:
        """One step of the parameters ``chosen``, by their local gradients. A collective call where they are sharded."""
        momentum = [self._momentum[i] for i in chosen]
        torch._foreach_lerp_(momentum, list(gradients), 1 - MOMENTUM)
        ahead = torch._foreach_lerp(list(gradients), momentum, MOMENTUM)
        # Matrices of one shape are computed together: small ones cost little more than one.
        alike: dict[tuple[int, ...], list[tuple[torch.nn.Parameter, torch.Tensor]]] = defaultdict(list)
        for i, direction in zip(chosen, ahead, strict=True):
            parameter = self._parameters[i]
            whole = self._layout.whole(direction, parameter)
            alike[tuple(whole.shape)].append((parameter, whole))
        for shape, members in alike.items():
            size = 0.2 * math.sqrt(max(shape[-2:]))
            steps = orthogonal(torch.stack([direction for _, direction in members]))
            for (parameter, _), step in zip(members, steps, strict=True):
                weights = self._layout.local(parameter.detach())
                weights.mul_(1 - rate * self.settings.weight_decay)
                weights.add_(self._layout.part(step, parameter).to(weights.dtype), alpha=-rate * size)

    def state(self, index: int) -> dict[str, torch.Tensor]:
        """``momentum`` of this rank's part of the parameter; it shares the rule's memory."""
        return {"momentum": self._momentum[index]}

    def move(self, device: torch.device) -> None:
        """Moves the momentum."""
        self._momentum[:] = self._resting.moved("momentum", self._momentum, device)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """``[..., rows, columns]``: U V^T of each matrix U S V^T, roughly (singular values between 0.7 and 1.2).

    Newton-Schulz iterations, in bfloat16 on a GPU. A matrix of zeros stays one.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.reshape(shape)
    return x.mT if tall else x
