"""How far two policies are apart on the tokens of a batch: `mismatch/...`, `drift/...`, `rollout_correction/...`.

l = log pi_old - log pi_roll. What needs every token is added up piece by piece (`...Seen`); the metrics are made of
those sums and of vectors ``[S]``. Names are those of the metric catalogue; all are tensors ``[]`` until
`moments.floats` takes them from the device in one transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rljob_trainer.algorithms.moments import Metrics, Moments, floats
from rljob_trainer.algorithms.rejection import LOG_RATIO_BOUND, Rejection, Verdict
from rljob_trainer.algorithms.segments import Segments, kept_only, masked_mean
from rljob_trainer.algorithms.weights import Weights

_ROOT = "rollout_correction"
_LARGEST_LOG_PERPLEXITY = 600.0
"""Perplexities are cut at e^600, so that those of any number of sequences add up within float64."""


@dataclass(frozen=True, eq=False)
class LogRatios:
    """l of a piece of the batch and what else is made of it only once. Streams ``[tokens]``, 0 where masked."""

    old: Tensor
    rollout: Tensor
    log_ratio: Tensor
    mask: Tensor
    segments: Segments

    @staticmethod
    def of(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, segments: Segments) -> LogRatios:
        old, rollout = kept_only(old_log_probs, mask), kept_only(rollout_log_probs, mask)
        return LogRatios(old, rollout, kept_only(old_log_probs - rollout_log_probs, mask), mask, segments)

    @cached_property
    def counts(self) -> Tensor:
        """``[S]`` int64: masked tokens."""
        return self.segments.count(self.mask)

    @cached_property
    def clamped(self) -> Tensor:
        return self.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @cached_property
    def excess(self) -> Tensor:
        """rho - 1 of the clamped l, exact near 1."""
        return torch.expm1(self.clamped)


@dataclass(frozen=True, eq=False)
class DifferenceSeen:
    """Sums for perplexities, KL and chi-square."""

    counts: Tensor  # [S] int64
    old: Tensor  # [S] float64, the sum of log pi_old
    log_ratio: Tensor  # [S] float64, the sum of l
    k3: Tensor  # []
    chi2: Tensor  # []

    @staticmethod
    def of(here: LogRatios) -> DifferenceSeen:
        excess = here.excess
        return DifferenceSeen(
            counts=here.counts,
            old=here.segments.sum(here.old, dtype=torch.float64),
            log_ratio=here.segments.sum(here.log_ratio, dtype=torch.float64),
            k3=(excess - here.clamped).double().sum(),
            chi2=torch.addcmul(2.0 * excess, excess, excess).double().sum(),
        )

    def metrics(self) -> Metrics:
        present, tokens = self.counts > 0, self.counts.clamp(min=1)
        total = self.counts.sum().clamp(min=1)
        training, mean_ratio = -self.old / tokens, self.log_ratio / tokens
        rollout = mean_ratio + training  # log-perplexities
        whole = self.log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        metrics = {
            f"{_ROOT}/perplexity/training": masked_mean(_perplexity(training), present),
            f"{_ROOT}/perplexity/rollout": masked_mean(_perplexity(rollout), present),
            f"{_ROOT}/perplexity/ratio": masked_mean(_perplexity(-mean_ratio), present),
            f"{_ROOT}/log_perplexity/training": masked_mean(training, present),
            f"{_ROOT}/log_perplexity/rollout": masked_mean(rollout, present),
            f"{_ROOT}/log_perplexity/absolute_difference": masked_mean(mean_ratio.abs(), present),
            f"{_ROOT}/kl": -self.log_ratio.sum() / total,
            f"{_ROOT}/k3_kl": self.k3 / total,
            f"{_ROOT}/chi2_token": self.chi2 / total,
            f"{_ROOT}/chi2_sequence": masked_mean(torch.expm1(2.0 * whole), present),
        }
        difference = Moments.of(-mean_ratio, present).metrics(f"{_ROOT}/log_perplexity/difference")
        return metrics | {name: value for name, value in difference.items() if not name.endswith("/std")}


def _perplexity(log_perplexity: Tensor) -> Tensor:
    return log_perplexity.clamp(max=_LARGEST_LOG_PERPLEXITY).exp()


@dataclass(frozen=True, eq=False)
class WeightsSeen:
    """Ratios before and weights after cutting, not normalised."""

    counts: Tensor  # [S]
    ratios: Tensor  # [S] a sequence's own, or the mean of its tokens'
    weights: Tensor  # [S] the same
    of_tokens: Moments
    high: Tensor  # [] tokens above the upper bound
    low: Tensor
    zeroed: Tensor

    @staticmethod
    def of(here: LogRatios, ratio: Tensor, weights: Tensor, settings: Weights) -> WeightsSeen:
        """``ratio`` and ``weights`` are ``[tokens]`` or ``[S]``, as the level says."""
        by_sequence = settings.level == "sequence"
        counts = here.counts
        low = 1.0 / settings.high if settings.low is None else settings.low

        def tokens(condition: Tensor) -> Tensor:
            return (
                torch.where(condition, counts, 0).sum() if by_sequence else torch.count_nonzero(condition & here.mask)
            )

        zeroed = tokens((ratio > settings.high) | (ratio < settings.low)) if settings.low is not None else counts.sum()
        divisor = counts.clamp(min=1)
        return WeightsSeen(
            counts=counts,
            ratios=ratio.double() if by_sequence else here.segments.sum(ratio, here.mask, torch.float64) / divisor,
            weights=weights.double() if by_sequence else here.segments.sum(weights, here.mask, torch.float64) / divisor,
            of_tokens=Moments.repeated(weights, counts) if by_sequence else Moments.of(weights, here.mask),
            high=tokens(ratio > settings.high),
            low=tokens(ratio < low),
            zeroed=zeroed,
        )

    def divisor(self, settings: Weights) -> Tensor | None:
        """``[]``: the mean weight, if weights are to be divided by it; 1 when all of them are zeroed."""
        if not settings.normalize:
            return None
        present = self.counts > 0
        mean = self.of_tokens.mean if settings.level == "token" else masked_mean(self.weights, present)
        return torch.where(mean > 0, mean, 1.0)

    def metrics(self, settings: Weights) -> Metrics:
        root, divisor = f"{_ROOT}/weight", self.divisor(settings)
        scale: Tensor | float = 1.0 if divisor is None else divisor
        total = self.counts.sum().clamp(min=1)
        metrics = self.of_tokens.metrics(root, scale)
        metrics[f"{root}/fraction_high"] = self.high / total
        metrics[f"{root}/fraction_low"] = self.low / total
        metrics[f"{root}/effective_sample_size"] = self.of_tokens.effective_size
        if settings.low is not None and not settings.clamp:
            metrics[f"{root}/zeroed_ratio"] = self.zeroed / total
        if divisor is not None:
            metrics[f"{root}/normalization"] = divisor
        low = 1.0 / settings.high if settings.low is None else settings.low
        present, weights = self.counts > 0, self.weights / scale
        metrics |= Moments.of(weights, present).metrics(f"{root}/sequence")
        deviation = torch.where(present, (weights - 1.0).abs(), 0)
        metrics[f"{root}/sequence/max_deviation"] = deviation.amax() if deviation.numel() else deviation.sum()
        for name, condition in (("high", self.ratios > settings.high), ("low", self.ratios < low)):
            metrics[f"{root}/sequence/fraction_{name}"] = masked_mean(condition.double(), present)
        return metrics


@dataclass(frozen=True, eq=False)
class RuleSeen:
    """What a rejection rule saw, of tokens or of sequences."""

    values: Moments
    above: Tensor  # []
    below: Tensor
    counts: Tensor  # [S]
    sequences: Tensor  # [S] float64: a rule of tokens: the mean value of each sequence's; else empty

    @staticmethod
    def of(here: LogRatios, rule: Rejection, verdict: Verdict) -> RuleSeen:
        by_token = rule.over == "token"
        counted = here.mask if by_token else here.counts > 0
        above, below = torch.count_nonzero(verdict.above & counted), torch.count_nonzero(verdict.below & counted)
        means = here.segments.mean(verdict.value.double(), here.mask) if by_token else verdict.value.new_zeros(0)
        return RuleSeen(Moments.of(verdict.value, counted), above, below, here.counts, means)

    def metrics(self, rule: Rejection) -> Metrics:
        root, counted = f"{_ROOT}/rejection/{rule.name}", self.values.count.clamp(min=1)
        shares = {f"{root}/fraction_high": self.above / counted, f"{root}/fraction_low": self.below / counted}
        of_sequences = self._of_sequences(f"{root}/sequence", rule) if rule.over == "token" else {}
        return self.values.metrics(root) | shares | of_sequences

    def _of_sequences(self, root: str, rule: Rejection) -> Metrics:
        """Metrics of the sequences' means: how far they are from 0, where equal policies are, and beyond the bounds."""
        present, (low, high) = self.counts > 0, rule.bounds
        metrics = Moments.of(self.sequences, present).metrics(root)
        deviation = torch.where(present, self.sequences.abs(), 0)
        metrics[f"{root}/max_deviation"] = deviation.amax() if deviation.numel() else deviation.sum()
        metrics[f"{root}/fraction_high"] = masked_mean((self.sequences > high).double(), present)
        metrics[f"{root}/fraction_low"] = masked_mean((self.sequences < low).double(), present)
        return metrics


@dataclass(frozen=True, eq=False)
class LossSeen:
    """What one rule, or all of them, left out."""

    tokens: Tensor  # []
    sequences: Tensor  # [] those that lost a token
    all_tokens: Tensor
    all_sequences: Tensor

    @staticmethod
    def of(here: LogRatios, out: Tensor) -> LossSeen:
        """``out [tokens]``: masked tokens."""
        lost = here.segments.count(out)
        return LossSeen(lost.sum(), torch.count_nonzero(lost), here.counts.sum(), torch.count_nonzero(here.counts))

    def metrics(self, rule: Rejection | None = None) -> Metrics:
        root = f"{_ROOT}/rejection" if rule is None else f"{_ROOT}/rejection/{rule.name}"
        return {
            f"{root}/masked_ratio": self.tokens / self.all_tokens.clamp(min=1),
            f"{root}/masked_sequence_ratio": self.sequences / self.all_sequences.clamp(min=1),
        }


@torch.no_grad()
def most_apart(
    trainer_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor, segments: Segments, count: int
) -> list[tuple[int, float]]:
    """The ``count`` sequences that trainer and engine disagree most about: position in the batch, abs(mean l) in nats.

    The largest first; those without a masked token are left out. Streams ``[tokens]``.
    """
    log_ratio = kept_only(trainer_log_probs - engine_log_probs, mask)
    apart = segments.mean(log_ratio.double(), mask).abs()
    present = int((segments.count(mask) > 0).sum())
    values, rows = torch.topk(torch.where(segments.count(mask) > 0, apart, -1.0), min(count, present))
    return list(zip(rows.tolist(), values.tolist(), strict=True))


@torch.no_grad()
def agreement_metrics(trainer_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """The ``mismatch/...`` metrics: do trainer and engine give the same tokens the same probability?

    Those of ``policy_distance`` belong to them. For tokens made
    entirely under the trainer's present weights, so that any difference is numerical. All ``[tokens]``.
    """
    trainer = kept_only(trainer_log_probs, mask).double()
    engine = kept_only(engine_log_probs, mask).double()
    log_ratio = trainer - engine
    probability = Moments.of((trainer.exp() - engine.exp()).abs(), mask).metrics("mismatch/probability")
    log_prob = Moments.of(log_ratio.abs(), mask).metrics("mismatch/log_prob")
    p = kept_only(trainer.exp() - masked_mean(trainer.exp(), mask), mask)
    q = kept_only(engine.exp() - masked_mean(engine.exp(), mask), mask)
    scale = (p.square().sum() * q.square().sum()).sqrt()
    return floats(
        {
            "mismatch/tokens": mask.sum(),
            "mismatch/log_prob/mean": log_prob["mismatch/log_prob/mean"],
            "mismatch/log_prob/max": log_prob["mismatch/log_prob/max"],
            "mismatch/probability/mean": probability["mismatch/probability/mean"],
            "mismatch/probability/max": probability["mismatch/probability/max"],
            "mismatch/probability/std": probability["mismatch/probability/std"],
            "mismatch/correlation": torch.where(scale > 0, (p * q).sum() / scale.clamp(min=1e-300), 1.0),
        }
    )


@dataclass(frozen=True, slots=True)
class PolicyDistance:
    """How far the trainer's policy is from the one that sampled, of rho = pi_trainer / pi_engine."""

    kl: float
    """KL(engine, trainer) in nats, estimated by k3 on the sampled tokens."""
    chi_square: float
    """E[rho^2] - 1 over tokens."""
    effective_sample_size: float
    """1 / E[(w / mean w)^2] of the sequences' products of rho, in (0, 1]."""

    def metrics(self, family: str) -> dict[str, float]:
        """Under the names of a ``family`` of metrics, ``mismatch`` or ``drift``."""
        return {
            f"{family}/kl": self.kl,
            f"{family}/chi_square": self.chi_square,
            f"{family}/effective_sample_size": self.effective_sample_size,
        }


@torch.no_grad()
def policy_distance(
    trainer_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor, segments: Segments
) -> PolicyDistance:
    """Distance of the trainer's policy from the one that sampled; all ``[tokens]``. Where tokens are of other versions,
    what the policy has learned since is in it, beside what engine and trainer disagree about."""
    log_ratio = kept_only(trainer_log_probs.double() - engine_log_probs.double(), mask)
    clamped = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    excess = torch.expm1(clamped)
    whole = segments.sum(log_ratio, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return PolicyDistance(
        **floats(
            {
                "kl": masked_mean(excess - clamped, mask),
                "chi_square": masked_mean(excess * (excess + 2.0), mask),
                "effective_sample_size": Moments.of(whole, segments.count(mask) > 0).effective_size,
            }
        )
    )
