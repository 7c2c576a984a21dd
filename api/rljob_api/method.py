"""What the API knows of a method: its parameters and what it demands of a job. Which there are: ``methods``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Value = float | int | bool | None
ParameterKind = Literal["boolean", "integer", "number", "text", "object"] | tuple[str, ...]
"""What a parameter of a reward function may be; several texts: one of these."""


@dataclass(frozen=True)
class MethodSpec:
    """Parameters (snake_case) with the value each has when neither job nor preset gives one."""

    parameters: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class EstimatorMethod(MethodSpec):
    """What an advantage estimator needs besides rewards."""

    compares_samples: bool = False
    """Works with differences between samples of one prompt: samplesPerPrompt must be 2 or more."""
    needs_critic: bool = False


@dataclass(frozen=True)
class PolicyLossMethod(MethodSpec):
    """What a policy loss demands of the rest."""

    aggregation: str | None = None
    """The only aggregation with which the method is what its paper says; None: any."""
    needs_bypass: bool = False
    """The anchor of its ratio is the engine's log-probs."""
