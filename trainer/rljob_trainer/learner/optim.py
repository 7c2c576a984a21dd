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
        self._locals = [torch.nn.Parameter(local(p.detach())) for p in self._parameters]
        # A parameter with one dimension is a norm's scale or a bias.
        decayed = [p for p, full in zip(self._locals, self._parameters, strict=True) if full.ndim > 1]
        others = [p for p, full in zip(self._locals, self._parameters, strict=True) if full.ndim <= 1]
        self._adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            fused=True,
        )

    def step(self, rate: float) -> StepOutcome:
        """Clips, applies and clears the gradients. A gradient that is not finite changes nothing and is reported."""
        gradients = []
        for parameter, own in zip(self._parameters, self._locals, strict=True):
            own.grad = None if parameter.grad is None else local(parameter.grad)
            if own.grad is not None:
                gradients.append(own.grad)
        norm = self._norm(gradients)
        value = float(norm)
        problem = None
        if math.isfinite(value):
            if self.settings.gradient_clip > 0:
                torch._foreach_mul_(gradients, (self.settings.gradient_clip / (norm + 1e-6)).clamp(max=1.0))
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
        else:
            problem = self._first_bad() or f"the norm of the gradient is {value}"
        self.clear()
        return StepOutcome(value, problem)

    def clear(self) -> None:
        """Drops all gradients."""
        for tensor in (*self._parameters, *self._locals):
            tensor.grad = None

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        norms = torch._foreach_norm(gradients)
        total = torch.stack([n.float() for n in norms]).square().sum()
        if self._shards is not None:
            dist.all_reduce(total, group=self._shards)
        return total.sqrt()

    def _first_bad(self) -> str | None:
        """The first parameter, on this rank, whose gradient is not finite."""
        for name, own in zip(self.names, self._locals, strict=True):
            if own.grad is not None and not bool(own.grad.isfinite().all()):
                return f"the gradient of {name} is not finite"
        return None

    # --- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """``NAME.exp_avg``, ``NAME.exp_avg_sq`` in the shape and sharding of each parameter, and ``NAME.step``.

        The tensors share memory with the optimizer's own, so that a checkpoint is read in place.
        """
        result: dict[str, torch.Tensor] = {}
        for name, parameter, own in zip(self.names, self._parameters, self._locals, strict=True):
            state = self._adam.state[own]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=own.device)
                state["exp_avg"] = torch.zeros_like(own, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(own, memory_format=torch.preserve_format)
            result[f"{name}.step"] = state["step"]
            for moment in ("exp_avg", "exp_avg_sq"):
                result[f"{name}.{moment}"] = _like(state[moment], parameter)
        return result

    def move(self, device: torch.device) -> None:
        """Moves the moments (to host memory between updates, and back)."""
        for state in self._adam.state.values():
            for key, tensor in state.items():
                state[key] = tensor.to(device)

    def rebind(self) -> None:
        """Takes up the parameters' present memory after they were moved."""
        for parameter, own in zip(self._parameters, self._locals, strict=True):
            own.data = local(parameter.detach())


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
