"""From a loss per token to one number, always divided by counts of the whole mini-batch over all ranks.

A mini-batch's loss is the plain sum of `aggregate(...)` over its micro-batches and ranks, so gradients simply add up
and neither micro-batch size nor rank count changes anything but rounding. Sequences without masked tokens count
nowhere. Where an episode has several sequences (its leaves), each counts for its share of it, `Segments.shares`, if
sequences are averaged: the episodes weigh the same, whatever became of their histories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rljob_trainer.algorithms.registry import Method, Registry
from rljob_trainer.algorithms.segments import Segments, kept_only


@dataclass(frozen=True)
class LossCounts:
    """What a mini-batch (over all ranks) holds: add the counts of its parts up before the first micro-batch."""

    tokens: int
    """Masked tokens."""
    sequences: float
    """Sequences with at least one masked token, each for its share of an episode; of a prompt (promptMean)."""

    @staticmethod
    def of(mask: Tensor, segments: Segments) -> LossCounts:
        """Counts ``mask [tokens]``; waits for the device, so do it once a mini-batch, best on host tensors."""
        per_sequence = segments.count(mask)
        there = per_sequence > 0
        return LossCounts(int(per_sequence.sum()), float((there * segments.weights).sum()))

    def __add__(self, other: LossCounts) -> LossCounts:
        return LossCounts(self.tokens + other.tokens, self.sequences + other.sequences)


@dataclass(frozen=True)
class Aggregation(Method[Tensor]):
    """Makes one number of a stream; see `aggregate`."""

    over_prompts: bool = False
    """``Segments.shares`` are to be shares of a prompt's tokens, not of an episode."""


aggregations: Registry[Aggregation] = Registry("aggregation")


def aggregation(name: str, *, over_prompts: bool = False) -> Callable[[Callable[..., Tensor]], Aggregation]:
    """Registers an aggregation: ``(per_token [tokens], segments, mask, counts, *, settings) -> []``.

    ``per_token`` arrives with 0 where the mask is False.
    """

    def register(function: Callable[..., Tensor]) -> Aggregation:
        return aggregations.add(Aggregation(name, function, over_prompts))

    return register


def aggregate(
    name: str, per_token: Tensor, segments: Segments, mask: Tensor, counts: LossCounts, **settings: Any
) -> Tensor:
    """This micro-batch's share ``[]`` of the mini-batch's loss; ``counts`` are those of the whole mini-batch."""
    return aggregations[name](kept_only(per_token, mask), segments, mask, counts, **settings)


@aggregation("tokenMean")
def token_mean(per_token: Tensor, segments: Segments, mask: Tensor, counts: LossCounts) -> Tensor:
    """Every token weighs the same (DAPO, arXiv 2503.14476, section 3.3)."""
    return per_token.sum() / max(counts.tokens, 1)


@aggregation("tokenSum")
def token_sum(per_token: Tensor, segments: Segments, mask: Tensor, counts: LossCounts) -> Tensor:
    """The plain sum over tokens."""
    return per_token.sum()


@aggregation("seqMeanTokenMean")
def seq_mean_token_mean(per_token: Tensor, segments: Segments, mask: Tensor, counts: LossCounts) -> Tensor:
    """Every sequence weighs the same, or its share of an episode (GRPO, arXiv 2402.03300, eq. 3)."""
    return (segments.mean(per_token, mask) * segments.weights).sum() / (counts.sequences or 1)


@aggregation("promptMean", over_prompts=True)
def prompt_mean(per_token: Tensor, segments: Segments, mask: Tensor, counts: LossCounts) -> Tensor:
    """Every prompt weighs the same, and so do the tokens of all its responses (ScaleRL, arXiv 2510.13786, section 4).

    A sequence's share is its part of the masked tokens of its prompt, so that those of a prompt add up to 1.
    """
    if segments.shares is None:
        raise ValueError("promptMean needs the shares of the sequences, which only the whole mini-batch tells")
    return seq_mean_token_mean(per_token, segments, mask, counts)


@aggregation("seqMeanTokenSum")
def seq_mean_token_sum(per_token: Tensor, segments: Segments, mask: Tensor, counts: LossCounts) -> Tensor:
    """Sum over each sequence, mean over sequences: the policy gradient of whole responses."""
    return per_token.sum() / (counts.sequences or 1)


@aggregation("seqMeanTokenSumNorm")
def seq_mean_token_sum_norm(
    per_token: Tensor, segments: Segments, mask: Tensor, counts: LossCounts, *, scale: float
) -> Tensor:
    """seqMeanTokenSum divided by a constant ``scale``, usually the longest allowed response (Dr. GRPO, 2503.20783)."""
    if scale <= 0:
        raise ValueError(f"scale must be above 0 (the longest allowed response is usual), but is {scale}")
    return per_token.sum() / ((counts.sequences or 1) * scale)
