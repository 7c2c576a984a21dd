"""What an advantage estimator gets and gives, and the one function that the driver calls.

The estimators themselves live in files named for their families; this file only registers, checks inputs once for all
of them, and makes sure that what is masked cannot matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rljob_trainer.algorithms.groups import Groups
from rljob_trainer.algorithms.registry import Method, Registry
from rljob_trainer.algorithms.segments import NotFiniteError, Segments, kept_only, wide


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """One batch of S sequences. Give ``rewards`` (token rewards, for example with a KL penalty), ``scores``, or both.

    With ``rewards`` a sequence's own reward is their sum over its masked tokens (its ``score``, if it has no such
    token); without, ``scores`` stand at the last masked token.
    """

    mask: Tensor  # [tokens] bool
    segments: Segments
    scores: Tensor | None = None  # [S]
    rewards: Tensor | None = None  # [tokens]
    groups: Tensor | None = None  # [S] integers: samples of one prompt share one
    values: Tensor | None = None  # [tokens] the critic's V
    final_values: Tensor | None = None  # [S] V after the last token: bootstraps where `truncated`
    truncated: Tensor | None = None  # [S] bool
    greedy_scores: Tensor | None = None  # [S] reward of the prompt's greedy response (remax)
    parts: Tensor | None = None  # [S, K] the single rewards before they were added up (gdpo)
    part_weights: Tensor | None = None  # [K]
    log_probs: Tensor | None = None  # [tokens] the trainer's pi (optimal token baseline)
    sum_squared_probs: Tensor | None = None  # [tokens] sum over the vocabulary of the same policy's pi squared
    weights: Tensor | None = None  # [tokens] importance weights (the same)

    @cached_property
    def token_rewards(self) -> Tensor:
        """``[tokens]``: rewards with 0 wherever the mask is False."""
        if self.rewards is not None:
            return kept_only(self.rewards, self.mask)
        assert self.scores is not None
        return torch.where(self.segments.is_last(self.mask), self.segments.spread(self.scores), 0)

    @cached_property
    def sequence_rewards(self) -> Tensor:
        """``[S]``, float64."""
        if self.rewards is None:
            assert self.scores is not None
            return self.scores.double()
        total = self.segments.sum(self.rewards, self.mask, torch.float64)
        if self.scores is None:
            return total
        return torch.where(self.segments.count(self.mask) > 0, total, self.scores.double())

    @cached_property
    def grouping(self) -> Groups:
        assert self.groups is not None
        return Groups(self.groups)

    def widened(self) -> AdvantageInputs:
        """These inputs with every stream of half precision turned into float32."""
        narrow: dict[str, Any] = {
            field.name: wide(stream)
            for field in fields(self)
            if isinstance(stream := getattr(self, field.name), Tensor) and wide(stream) is not stream
        }
        return replace(self, **narrow) if narrow else self

    @property
    def dtype(self) -> torch.dtype:
        """The working precision: that of the values, else of the rewards."""
        for stream in (self.values, self.rewards, self.scores):
            if stream is not None:
                return stream.dtype
        raise ValueError("an advantage needs `rewards` or `scores`")

    def spread(self, per_sequence: Tensor) -> Tensor:
        """``[S]`` to ``[tokens]`` in the working precision, 0 wherever the mask is False."""
        return kept_only(self.segments.spread(per_sequence.to(self.dtype)), self.mask)


@dataclass(frozen=True, eq=False)
class AdvantageOutput:
    """Both are 0 wherever the mask is False."""

    advantages: Tensor  # [tokens]
    returns: Tensor | None = None  # [tokens], the critic's targets


@dataclass(frozen=True)
class AdvantageEstimator(Method[AdvantageOutput]):
    """An estimator and what it needs, for validation and for the driver."""

    smallest_group: int = 1
    """Samples of a prompt below which it makes no sense (1: it does not compare samples of a prompt)."""
    needs_critic: bool = False
    needs_greedy: bool = False
    needs_parts: bool = False
    needs_sum_squared_probs: bool = False

    @property
    def needs_groups(self) -> bool:
        return self.smallest_group > 1

    def __call__(self, inputs: AdvantageInputs, **settings: Any) -> AdvantageOutput:
        bound = self.bind(settings)
        inputs = inputs.widened()
        self._check(inputs)
        with torch.no_grad():
            return self.function(inputs, **bound)

    def _check(self, inputs: AdvantageInputs) -> None:
        needed = {
            "groups": self.needs_groups,
            "values": self.needs_critic,
            "greedy_scores": self.needs_greedy,
            "parts": self.needs_parts,
            "sum_squared_probs": self.needs_sum_squared_probs,
            "log_probs": self.needs_sum_squared_probs,
        }
        for name, is_needed in needed.items():
            if is_needed and getattr(inputs, name) is None:
                raise ValueError(f"the advantage estimator {self.name} needs `{name}`, which this batch lacks")
        if inputs.rewards is None and inputs.scores is None:
            raise ValueError("an advantage needs `rewards` or `scores`, but this batch has neither")
        if inputs.final_values is not None and inputs.truncated is None:
            raise ValueError("`final_values` bootstrap truncated responses: pass `truncated` too")
        given = (inputs.scores, None if inputs.rewards is None else inputs.token_rewards)
        if not all(bool(stream.sum().isfinite()) for stream in given if stream is not None):
            refuse_non_finite("reward", inputs.sequence_rewards)
        for name in ("greedy_scores", "parts"):
            if getattr(inputs, name) is not None:
                refuse_non_finite(name, getattr(inputs, name))
        if self.needs_sum_squared_probs:
            for name in ("log_probs", "sum_squared_probs", "weights"):
                _refuse_nan(name, getattr(inputs, name), inputs)


def _refuse_nan(what: str, stream: Tensor | None, inputs: AdvantageInputs) -> None:
    """Raises ``NotFiniteError`` naming the sample and its token when a masked value of ``stream [tokens]`` is NaN, or
    larger than any number (log-probs of -inf are those of impossible tokens)."""
    if stream is None:
        return
    bad = (stream.isnan() | (stream == torch.inf)) & inputs.mask
    if bool(bad.any()):
        token = int(bad.nonzero()[0])
        row, position = inputs.segments.place_of(token)
        raise NotFiniteError(
            f"the {what} of sample {row} of this batch: {float(stream[token])} at its response token {position} cannot "
            "weight a baseline; check the model that scored this sample",
            row,
        )


def refuse_non_finite(what: str, values: Tensor) -> None:
    """Raises ``NotFiniteError`` naming the samples (positions in the batch) whose value is NaN or infinite."""
    bad = ~values.isfinite()
    if values.ndim > 1:
        bad = bad.any(dim=1)
    if bool(bad.any()):
        rows = bad.nonzero().flatten().tolist()
        first = values[rows[0]].tolist()
        raise NotFiniteError(
            f"the {what} of sample {rows[0]} of this batch: {first} is not finite (samples affected: "
            f"{_shortened(rows)}); check what the reward function or the critic returned for this sample",
            rows[0],
        )


def _shortened(rows: list[int]) -> str:
    listed = ", ".join(map(str, rows[:8]))
    return listed if len(rows) <= 8 else f"{listed} and {len(rows) - 8} more"


advantage_estimators: Registry[AdvantageEstimator] = Registry("advantage estimator")


def advantage_estimator(name: str, **facts: Any) -> Callable[[Callable[..., AdvantageOutput]], AdvantageEstimator]:
    """Registers an estimator under the name used in job files; ``facts`` are fields of ``AdvantageEstimator``."""

    def register(function: Callable[..., AdvantageOutput]) -> AdvantageEstimator:
        return advantage_estimators.add(AdvantageEstimator(name, function, **facts))

    return register


def advantages(estimator: str, inputs: AdvantageInputs, **settings: Any) -> AdvantageOutput:
    """Advantages (and the critic's targets, if the method has a critic) of one batch.

    ``settings`` are the keyword-only parameters of the named estimator. Raises ``ValueError`` for an unknown estimator
    or setting, for inputs that the estimator needs and does not get, and for a reward that is not finite or a log-prob,
    sum of squares or weight that is NaN (naming the sample).
    """
    return advantage_estimators[estimator](inputs, **settings)
