"""AdamW on a rank's own shards: schedule, clipping by the global norm, and steps that are refused.

The optimizer works on plain local tensors, so that it neither knows about sharding nor pays for it. The learning rate
is a function of the number of updates (policy versions) done, not of optimizer steps: all mini-batches of one update
share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from rljob_trainer.learner.settings import OptimizerSettings


def learning_rate(settings: OptimizerSettings, update: int, total_updates: int | None) -> float:
    """The rate of update number ``update`` (from 0): linear warm-up to the peak, then the schedule.

    The first of ``warmup_steps`` updates has 1 / warmup_steps of the peak, none has 0. ``cosine`` and ``linear`` fall
    from the peak, right after the warm-up, to ``min_learning_rate_ratio`` of it at the last of ``total_updates``
    and stay there.
    """
    peak = settings.learning_rate
    if update < settings.warmup_steps:
        return peak * (update + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    if total_updates is None:
        raise ValueError(f"the {settings.schedule} schedule needs to know the number of steps: set stop.steps")
    length = max(1, total_updates - 1 - settings.warmup_steps)
    progress = min(1.0, (update - settings.warmup_steps) / length)
    falling = 0.5 * (1.0 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1.0 - progress
    floor = settings.min_learning_rate_ratio
    return peak * (floor + (1.0 - floor) * falling)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """``problem`` is set when the step was not taken: a non-finite gradient, and where it was seen first."""

    grad_norm: float
    problem: str | None = None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A rank's own part of a parameter or gradient, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AdamW:
    """Decoupled weight decay (arXiv:1711.05101) on matrices only: norms and biases are not decayed.

    ``shards`` is the process group over which parameters are sharded (None: this rank has all of them).
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        settings: OptimizerSettings,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        self.settings = settings
        self._shards = shards
        named = list(parameters)
        self.names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        shards_of = [local(parameter.detach()) for parameter in self._parameters]
        self._first = [torch.zeros_like(shard) for shard in shards_of]
        self._second = [torch.zeros_like(shard) for shard in shards_of]
        # Each parameter counts its own steps, as torch's kernels want it.
        self._steps = [torch.zeros((), dtype=torch.float32, device=shard.device) for shard in shards_of]

    def step(self, rate: float) -> StepOutcome:
        """Clips, applies and clears the gradients. A gradient that is not finite changes nothing and is reported."""
        used = [i for i, parameter in enumerate(self._parameters) if parameter.grad is not None]
        gradients = [local(g) for p in self._parameters if (g := p.grad) is not None]
        norm = self._norm(gradients)
        value = float(norm)
        problem = None
        if math.isfinite(value):
            if self.settings.gradient_clip > 0:
                torch._foreach_mul_(gradients, (self.settings.gradient_clip / (norm + 1e-6)).clamp(max=1.0))
            # A parameter with one dimension is a norm's scale or a bias.
            for decayed in (True, False):
                chosen = [n for n, i in enumerate(used) if (self._parameters[i].ndim > 1) == decayed]
                self._apply([used[n] for n in chosen], [gradients[n] for n in chosen], rate, decayed)
        else:
            problem = self._first_bad() or f"the norm of the gradient is {value}"
        self.clear()
        return StepOutcome(value, problem)

    def clear(self) -> None:
        """Drops all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _apply(self, chosen: list[int], gradients: list[torch.Tensor], rate: float, decayed: bool) -> None:
        settings = self.settings
        adamw(
            [local(self._parameters[i].detach()) for i in chosen],
            gradients,
            [self._first[i] for i in chosen],
            [self._second[i] for i in chosen],
            [],
            [self._steps[i] for i in chosen],
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

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        total = torch.stack(torch._foreach_norm(gradients)).square().sum()
        if self._shards is not None:
            dist.all_reduce(total, group=self._shards)
        return total.sqrt()

    def _first_bad(self) -> str | None:
        """The first parameter, on this rank, whose gradient is not finite."""
        for name, parameter in zip(self.names, self._parameters, strict=True):
            if parameter.grad is not None and not bool(local(parameter.grad).isfinite().all()):
                return f"the gradient of {name} is not finite"
        return None

    # --- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """``NAME.exp_avg``, ``NAME.exp_avg_sq`` in the shape and sharding of each parameter, and ``NAME.step``.

        The tensors share memory with the optimizer's own, so that a checkpoint is read in place.
        """
        result: dict[str, torch.Tensor] = {}
        for i, (name, parameter) in enumerate(zip(self.names, self._parameters, strict=True)):
            result[f"{name}.step"] = self._steps[i]
            result[f"{name}.exp_avg"] = _like(self._first[i], parameter)
            result[f"{name}.exp_avg_sq"] = _like(self._second[i], parameter)
        return result

    def move(self, device: torch.device) -> None:
        """Moves the moments (to host memory between updates, and back)."""
        for tensors in (self._first, self._second, self._steps):
            tensors[:] = [tensor.to(device) for tensor in tensors]


def _like(shard: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``shard`` as a distributed tensor laid out like ``parameter``; itself if that is not distributed."""
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
