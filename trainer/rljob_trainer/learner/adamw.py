"""AdamW's rule on a rank's own parts of parameters: it neither knows how they are cut nor pays for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.moves import Resting
from rljob_trainer.learner.settings import OptimizerSettings


class AdamW:
    """Decoupled weight decay (arXiv:1711.05101) on matrices only: norms and biases are not decayed."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], settings: OptimizerSettings, layout: Layout) -> None:
        self.settings, self._layout = settings, layout
        self._parameters = list(parameters)
        shards = [layout.local(parameter.detach()) for parameter in self._parameters]
        self._first = [torch.zeros_like(shard) for shard in shards]
        self._second = [torch.zeros_like(shard) for shard in shards]
        self._resting = Resting()
        # Each parameter counts its own steps, as torch's kernels want it.
        self._steps = [torch.zeros((), dtype=torch.float32, device=shard.device) for shard in shards]

    @torch.no_grad()
    def apply(self, chosen: Sequence[int], gradients: Sequence[torch.Tensor], rate: float) -> None:
        """One step of the parameters ``chosen``, by their local gradients."""
        settings = self.settings
        # A parameter with one dimension is a norm's scale or a bias.
        for decayed in (True, False):
            part = [(i, g) for i, g in zip(chosen, gradients, strict=True) if (self._parameters[i].ndim > 1) == decayed]
            if not part:
                continue
            adamw(
                [self._layout.local(self._parameters[i].detach()) for i, _ in part],
                [gradient for _, gradient in part],
                [self._first[i] for i, _ in part],
                [self._second[i] for i, _ in part],
                [],
                [self._steps[i] for i, _ in part],
                fused=True,
                has_complex=False,
                amsgrad=False,
                beta1=settings.betas[0],
                beta2=settings.betas[1],
                lr=rate,
                weight_decay=settings.weight_decay if decayed else 0.0,
                eps=settings.epsilon,
                maximize=False,
            )

    def state(self, index: int) -> dict[str, torch.Tensor]:
        """``exp_avg`` and ``exp_avg_sq`` of this rank's part of the parameter, and ``step``; they share memory."""
        return {"step": self._steps[index], "exp_avg": self._first[index], "exp_avg_sq": self._second[index]}

    def move(self, device: torch.device) -> None:
        """Moves the moments."""
        for name, tensors in (("first", self._first), ("second", self._second), ("steps", self._steps)):
            tensors[:] = self._resting.moved(name, tensors, device)
