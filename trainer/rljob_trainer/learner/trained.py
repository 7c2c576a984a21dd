"""A model with its optimizer and its place in the schedule: what actor and critic have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from rljob_trainer.learner.layout import Layout
from rljob_trainer.learner.models import Critic, Policy, layer_matrices
from rljob_trainer.learner.optim import Optimizer, StepOutcome
from rljob_trainer.learner.prefixes import Lengths
from rljob_trainer.learner.protocol import Int64Array
from rljob_trainer.learner.rates import learning_rate
from rljob_trainer.learner.settings import OptimizerSettings
from rljob_trainer.weights.shards import Shard

if TYPE_CHECKING:
    from rljob_trainer.learner.lora import Adapter


class Trained:
    """``name`` ("actor", "critic") stands in checkpoints, metrics and messages."""

    def __init__(
        self,
        name: str,
        module: Policy | Critic,
        settings: OptimizerSettings,
        *,
        total_updates: int | None,
        layout: Layout,
        adapter: Adapter | None = None,
    ) -> None:
        self.name = name
        self.module = module
        self.adapter = adapter
        """What is trained of the module, if it is not the module itself."""
        self.settings = settings
        self.total_updates = total_updates
        self.layout = layout
        matrices = layer_matrices(module) if settings.kind == "muon" else ()
        self.optimizer = Optimizer(self.parameters(), settings, layout, matrices)
        self._layer_parameters = sum(p.numel() for layer in module.layers for p in layer.parameters())
        self.updates = 0
        """Updates (policy versions) begun so far: the schedule's clock."""
        self.pull = 0
        """The pulls before the present one in the update that was begun last."""
        learning_rate(settings, settings.warmup_steps, total_updates)  # a schedule without an end is refused now

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are trained, by their names in the module."""
        return [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def begin(self, *, continues: bool) -> None:
        """The next update begins, or ``continues`` with another pull."""
        if continues and self.updates:
            self.pull += 1
        else:
            self.updates, self.pull = self.updates + 1, 0

    @property
    def clock(self) -> tuple[int, int]:
        """What ``begin`` moves on, to go back to."""
        return self.updates, self.pull

    @clock.setter
    def clock(self, clock: tuple[int, int]) -> None:
        self.updates, self.pull = clock

    @property
    def rate(self) -> float:
        """The learning rate of the update that was begun last."""
        return learning_rate(self.settings, max(0, self.updates - 1), self.total_updates)

    def cost(self, lengths: Lengths, indices: Int64Array) -> float:
        """About the floating-point operations of a forward and backward pass over sequences, to divide work by."""
        if not len(indices):
            return 0.0
        layers = 6.0 * self._layer_parameters * lengths.row_tokens(indices)
        # Logits are computed once more for the backward pass (``logprobs.py``).
        return layers + 8.0 * self.module.output_parameters * lengths.answers(indices)

    def step(self) -> StepOutcome:
        return self.optimizer.step(self.rate)

    def weights(self) -> list[Shard]:
        """This rank's parts of the trained parameters, by the names that ``state`` gives them, sharing their memory:
        never what was gathered, and rounded, for a forward pass."""
        self.layout.release(self.module)
        return [
            self.layout.shard(f"{self.name}.model.{name}", p, self.layout.local(p.detach()))
            for name, p in self.parameters()
        ]

    def state(self) -> list[Shard]:
        """This rank's parts of parameters and optimizer state, sharing their memory."""
        prefix = f"{self.name}.optimizer."
        return self.weights() + [replace(shard, name=prefix + shard.name) for shard in self.optimizer.state()]
