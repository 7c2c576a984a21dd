"""A model's optimizer: clipping by the global norm, steps that are refused, and which rule moves which parameter.

Rules (``adamw.py``, ``muon.py``) work on a rank's own parts of parameters, which are plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rljob_trainer.learner.adamw import AdamW
from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.muon import Muon
from rljob_trainer.learner.settings import OptimizerSettings
from rljob_trainer.weights.shards import Shard


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """``problem`` is set when the step was not taken: a non-finite gradient, and where it was seen first."""

    grad_norm: float
    problem: str | None = None


class Rule(Protocol):
    """How the parameters that it was made with are moved; they are named by their place among them."""

    def apply(self, chosen: Sequence[int], gradients: Sequence[torch.Tensor], rate: float) -> None:
        """One step of the parameters ``chosen``, by their local gradients."""
        ...

    def state(self, index: int) -> dict[str, torch.Tensor]:
        """What one parameter's next step depends on: scalars, and tensors laid out like this rank's part of it. They
        share the rule's memory."""
        ...

    def move(self, device: torch.device) -> None: ...


class Optimizer:
    """AdamW for all parameters, or Muon for some and AdamW for the others.

    ``layout`` says how they are spread over ranks. ``matrices`` are the names of those that Muon may have, if the
    settings ask for it.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.nn.Parameter]],
        settings: OptimizerSettings,
        layout: Layout | None = None,
        matrices: Collection[str] = (),
    ) -> None:
        self.settings = settings
        self._layout = layout or Layout()
        self._named = dict(parameters)
        orthogonalised = matrices if settings.kind == "muon" else ()
        self._rules: list[tuple[Rule, list[str]]] = []
        for make, names in (
            (Muon, [name for name in self._named if name in orthogonalised]),
            (AdamW, [name for name in self._named if name not in orthogonalised]),
        ):
            if names:
                self._rules.append((make([self._named[name] for name in names], settings, self._layout), names))

    def step(self, rate: float) -> StepOutcome:
        """Clips, applies and clears the gradients. A gradient that is not finite changes nothing and is reported."""
        gradients = {name: self._layout.local(p.grad) for name, p in self._named.items() if p.grad is not None}
        norm = self._layout.squared_norm(gradients).sqrt()
        value = float(norm)
        problem = None
        if math.isfinite(value):
            if self.settings.gradient_clip > 0:
                factor = (self.settings.gradient_clip / (norm + 1e-6)).clamp(max=1.0)
                torch._foreach_mul_(list(gradients.values()), factor)
            for rule, names in self._rules:
                chosen = [i for i, name in enumerate(names) if name in gradients]
                rule.apply(chosen, [gradients[names[i]] for i in chosen], rate)
        else:
            problem = self._first_bad() or f"the norm of the gradient is {value}"
        self.clear()
        return StepOutcome(value, problem)

    def divide(self, scale: float) -> None:
        """Takes off the gradients what the loss was multiplied by."""
        if scale != 1.0:
            torch._foreach_div_([self._layout.local(p.grad) for p in self._named.values() if p.grad is not None], scale)

    def clear(self) -> None:
        """Drops all gradients."""
        for parameter in self._named.values():
            parameter.grad = None

    def _first_bad(self) -> str | None:
        """The first parameter, on this rank, whose gradient is not finite."""
        for name, parameter in self._named.items():
            if parameter.grad is not None and not bool(self._layout.local(parameter.grad).isfinite().all()):
                return f"the gradient of {name} is not finite"
        return None

    # --- state --------------------------------------------------------------------------------------------------------

    def state(self) -> list[Shard]:
        """``NAME.WHAT`` for every parameter and what its rule keeps of it, laid out like the parameter.

        The tensors share memory with the optimizer's own, so that a checkpoint is read in place.
        """
        return [
            self._layout.shard(f"{name}.{what}", self._named[name] if tensor.ndim else tensor, tensor)
            for rule, names in self._rules
            for i, name in enumerate(names)
            for what, tensor in rule.state(i).items()
        ]

    def move(self, device: torch.device) -> None:
        """Moves the rules' state (to host memory between updates, and back)."""
        for rule, _ in self._rules:
            rule.move(device)
