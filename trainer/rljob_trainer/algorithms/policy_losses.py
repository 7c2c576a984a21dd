"""What a policy loss gets and gives, and how losses are registered. The losses live in files named for their families.

A loss is a function of streams and gives a loss per token; making one number of it is `aggregation`'s work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rljob_trainer.algorithms.registry import Method, Registry
from rljob_trainer.algorithms.segments import Segments, kept_only, wide

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 is finite in float32, and no gradient flows from beyond."""


@dataclass(frozen=True, eq=False)
class PolicyInputs:
    """Streams over the response tokens of a micro-batch of whole sequences. Only ``log_probs`` (and ``entropy``,
    ``vocabulary_kl``) carry gradients; what stands at masked positions is never looked at.
    """

    log_probs: Tensor  # [tokens] of the policy being trained
    advantages: Tensor  # [tokens]
    mask: Tensor  # [tokens] bool
    segments: Segments
    old_log_probs: Tensor | None = None  # [tokens] pi_old; None: on-policy, the ratio is exactly 1
    rollout_log_probs: Tensor | None = None  # [tokens] pi_roll
    ref_log_probs: Tensor | None = None  # [tokens] pi_ref
    weights: Tensor | None = None  # [tokens] rollout-correction weights, multiply the policy loss of each token
    rollout_share: Tensor | None = None  # [tokens] in [0, 1]: pi_old is interpolated, see `losses.actor_loss`
    entropy: Tensor | None = None  # [tokens]
    vocabulary_kl: Tensor | None = None  # [tokens] exact KL to the reference (kl kind `full`)
    selection: Tensor | None = None  # [tokens] from `Selector`, for the methods that look at the mini-batch first

    def widened(self) -> PolicyInputs:
        """These inputs with every stream of half precision turned into float32; gradients flow through."""
        narrow: dict[str, Any] = {
            field.name: wide(stream)
            for field in fields(self)
            if isinstance(stream := getattr(self, field.name), Tensor) and wide(stream) is not stream
        }
        return replace(self, **narrow) if narrow else self

    def cleaned(self) -> PolicyInputs:
        """These inputs with 0 at every masked position of every stream (its gradient there is 0 too)."""

        def clean(stream: Tensor | None) -> Tensor | None:
            return None if stream is None else torch.where(self.mask, stream, 0)

        return replace(
            self,
            log_probs=torch.where(self.mask, self.log_probs, 0),
            advantages=torch.where(self.mask, self.advantages, 0),
            old_log_probs=clean(self.old_log_probs),
            rollout_log_probs=clean(self.rollout_log_probs),
        )

    @cached_property
    def anchor(self) -> Tensor:
        """``[tokens]``: log pi_old, or the policy's own log-probs without gradient."""
        return self.log_probs.detach() if self.old_log_probs is None else self.old_log_probs

    @cached_property
    def log_ratio(self) -> Tensor:
        """``[tokens]``: log pi_theta - log pi_old, not clamped."""
        return self.log_probs - self.anchor

    @cached_property
    def ratio(self) -> Tensor:
        """``[tokens]``: pi_theta / pi_old, its logarithm clamped to +-20."""
        return self.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()

    def rollout(self, method: str) -> Tensor:
        """``rollout_log_probs``; raises ``ValueError`` naming the method when there are none."""
        if self.rollout_log_probs is None:
            raise ValueError(f"the policy loss {method} needs the rollout log-probs of the batch, which it lacks")
        return self.rollout_log_probs


@dataclass(frozen=True, eq=False)
class PolicyLossOutput:
    """``metrics`` are sums over masked tokens (scalars without gradient): they add up over micro-batches and ranks."""

    per_token: Tensor  # [tokens]
    metrics: dict[str, Tensor] = field(default_factory=dict)


Selector = Callable[..., Tensor]
"""(inputs of the whole mini-batch, generator, **settings of the loss) -> [tokens]: what only all of it tells, which
tokens are picked (bool) or what weights are divided by."""


@dataclass(frozen=True)
class PolicyLoss(Method[PolicyLossOutput]):
    """A loss and the facts around it."""

    aggregation: str | None = None
    """The only aggregation with which the method is what its paper says; None: any."""
    needs_rollout_log_probs: bool = False
    """The anchor of its ratio is the engine's log-probs: for `rolloutCorrection.mode: bypass` alone."""
    selector: Selector | None = None
    """Set for methods that look at the whole mini-batch (over all ranks) before the first gradient."""
    selects_if: str | None = None
    """The setting that must be true for this; None: always."""

    def looks_ahead(self, settings: Mapping[str, Any]) -> bool:
        """Whether `select_tokens` must be called with these settings, at the price of one more forward pass."""
        if self.selector is None or self.selects_if is None:
            return self.selector is not None
        return bool({**self.settings, **self.bind(settings)}[self.selects_if])

    def __call__(self, inputs: PolicyInputs, **settings: Any) -> PolicyLossOutput:
        bound = self.bind(settings)
        if self.needs_rollout_log_probs:
            inputs.rollout(self.name)
        if inputs.selection is None and self.looks_ahead(settings):
            raise ValueError(
                f"the policy loss {self.name} selects tokens of the whole mini-batch: "
                "call select_tokens() on it first and pass each micro-batch its part as `selection`"
            )
        output = self.function(inputs.widened().cleaned(), **bound)
        return PolicyLossOutput(torch.where(inputs.mask, output.per_token, 0), output.metrics)

    def select_tokens(self, inputs: PolicyInputs, generator: torch.Generator, **settings: Any) -> Tensor:
        """``[tokens]`` of the whole mini-batch: what the losses of its micro-batches get as ``selection``.

        ``inputs`` hold the mini-batch of all ranks, in one order that does not depend on their number, with log-probs
        from a forward pass without gradient; every rank calls this with an equal ``generator`` and keeps its part.
        """
        if self.selector is None:
            raise ValueError(f"the policy loss {self.name} selects no tokens")
        with torch.no_grad():
            return self.selector(inputs.widened().cleaned(), generator, **self.bind(settings))


policy_losses: Registry[PolicyLoss] = Registry("policy loss")


def policy_loss(name: str, **facts: Any) -> Callable[[Callable[..., PolicyLossOutput]], PolicyLoss]:
    """Registers a loss under the name used in job files; ``facts`` are fields of ``PolicyLoss``."""

    def register(function: Callable[..., PolicyLossOutput]) -> PolicyLoss:
        return policy_losses.add(PolicyLoss(name, function, **facts))

    return register


def masked_count(condition: Tensor, mask: Tensor) -> Tensor:
    """How many masked tokens meet a condition, as a float scalar without gradient."""
    return (condition & mask).sum().double()


def masked_sum(stream: Tensor, mask: Tensor) -> Tensor:
    """The sum over masked tokens, as a float64 scalar without gradient."""
    return kept_only(stream.detach(), mask).sum(dtype=torch.float64)


def ratio_metrics(inputs: PolicyInputs) -> dict[str, Tensor]:
    """How far the policy has moved from its anchor: sums of rho and of -log rho (the k1 estimate of the KL)."""
    return {
        "ratio/mean": masked_sum(inputs.ratio, inputs.mask),
        "approx_kl": masked_sum(-inputs.log_ratio, inputs.mask),
    }
