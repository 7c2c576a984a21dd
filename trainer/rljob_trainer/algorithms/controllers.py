"""Coefficients that follow a measurement: the KL penalty, and the entropy bonus. Their state belongs in checkpoints.

A measurement that is no finite number says nothing, and the coefficient stays: one such batch must not spoil all that
follow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class KlController(Protocol):
    """A KL coefficient that may change after each batch."""

    coefficient: float

    def update(self, kl: float, sequences: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: Mapping[str, float]) -> None: ...


@dataclass(slots=True)
class FixedKl:
    """The coefficient stays what it is."""

    coefficient: float = 0.001

    def update(self, kl: float, sequences: int) -> None:
        """Nothing depends on the measured KL."""

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coefficient = state["coefficient"]


@dataclass(slots=True)
class AdaptiveKl:
    """beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) sequences / horizon) (arXiv 1909.08593).

    A batch counts as at most one horizon, so that the factor lies in [0.8, 1.2] and beta keeps its sign.
    """

    coefficient: float = 0.001
    target: float = 0.1
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"target and horizon must be above 0, but are {self.target} and {self.horizon}")

    def update(self, kl: float, sequences: int) -> None:
        """``kl``: the batch's mean KL; ``sequences``: how many samples it was measured on."""
        if not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * min(sequences / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coefficient = state["coefficient"]


@dataclass(slots=True)
class EntropyTarget:
    """An entropy coefficient that holds the policy's entropy at a target.

    c <- clip(c + rate (target - entropy), minimum, maximum) after every batch: the gradient step of the constraint's
    multiplier, as for the temperature of soft actor-critic (arXiv 1812.05905, section 5). The bonus fades to
    ``minimum`` while the entropy is above the target.
    """

    target: float
    coefficient: float = 0.0
    rate: float = 0.005
    minimum: float = 0.0
    maximum: float = 0.1

    def __post_init__(self) -> None:
        if not self.minimum <= self.coefficient <= self.maximum:
            raise ValueError(
                f"the entropy coefficient must be between {self.minimum} and {self.maximum}, but is {self.coefficient}"
            )

    def update(self, entropy: float) -> None:
        """``entropy``: the batch's mean per token, in nats."""
        if not math.isfinite(entropy):
            return
        moved = self.coefficient + self.rate * (self.target - entropy)
        self.coefficient = min(max(moved, self.minimum), self.maximum)

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coefficient = state["coefficient"]
