"""How far two policies are apart on the tokens of a batch: the metrics `mismatch/...` and `rollout_correction/...`.

Everything takes clean streams (0 where the mask is False). l = log pi_old - log pi_roll. Names are those of the metric
catalogue; numbers leave as floats, in one transfer from the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.rejection import LOG_RATIO_BOUND, Rejection, Verdict
from rljob_trainer.algorithms.segments import Segments, masked_mean
from rljob_trainer.algorithms.weights import Weights

_ROOT = "rollout_correction"


def _floats(tensors: dict[str, Tensor]) -> dict[str, float]:
    values = torch.stack([t.double() for t in tensors.values()]).tolist() if tensors else []
    return dict(zip(tensors, values, strict=True))


def spread_of(name: str, values: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """mean, min, max and (population) std of the counted values; 0 when there is none."""
    some = counted.any()
    mean = masked_mean(values, counted)
    deviation = masked_mean((values - mean).square(), counted).sqrt()
    if values.numel() == 0:
        return {f"{name}/{s}": mean for s in ("mean", "min", "max", "std")}
    return {
        f"{name}/mean": mean,
        f"{name}/min": torch.where(some, torch.where(counted, values, torch.inf).amin(), 0),
        f"{name}/max": torch.where(some, torch.where(counted, values, -torch.inf).amax(), 0),
        f"{name}/std": deviation,
    }


def difference_metrics(
    old: Tensor, log_ratio: Tensor, mask: Tensor, segments: Segments
) -> tuple[dict[str, float], Tensor]:
    """Perplexities of both policies, KL, chi-square; and each sequence's |mean l| ``[S]``, -1 where it has no token."""
    present = segments.count(mask) > 0
    mean_old, mean_ratio = segments.mean(old, mask), segments.mean(log_ratio, mask)
    training, rollout = -mean_old, mean_ratio - mean_old  # log-perplexities
    clamped = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    whole = segments.sum(log_ratio, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    excess = torch.expm1(clamped)  # rho - 1, exact near 1
    metrics = {
        f"{_ROOT}/perplexity/training": masked_mean(training.exp(), present),
        f"{_ROOT}/perplexity/rollout": masked_mean(rollout.exp(), present),
        f"{_ROOT}/perplexity/ratio": masked_mean((training - rollout).exp(), present),
        f"{_ROOT}/log_perplexity/training": masked_mean(training, present),
        f"{_ROOT}/log_perplexity/rollout": masked_mean(rollout, present),
        f"{_ROOT}/log_perplexity/absolute_difference": masked_mean(mean_ratio.abs(), present),
        f"{_ROOT}/kl": masked_mean(-log_ratio, mask),
        f"{_ROOT}/k3_kl": masked_mean(excess - clamped, mask),
        f"{_ROOT}/chi2_token": masked_mean(excess * (excess + 2.0), mask),
        f"{_ROOT}/chi2_sequence": masked_mean(torch.expm1(2.0 * whole.double()), present),
    }
    difference = spread_of(f"{_ROOT}/log_perplexity/difference", -mean_ratio, present)
    metrics |= {name: value for name, value in difference.items() if not name.endswith("/std")}
    return _floats(metrics), torch.where(present, mean_ratio.abs(), -1.0)


def effective_sample_size(weights: Tensor, counted: Tensor) -> Tensor:
    """(mean w)^2 / mean w^2, in (0, 1]: the fraction of samples that count once reweighted; 1 if all weights are 0."""
    square = masked_mean(weights.square(), counted)
    return torch.where(square > 0, masked_mean(weights, counted).square() / square.clamp(min=1e-300), 1.0)


def weight_metrics(
    ratio: Tensor,
    weights: Tensor,
    counted: Tensor,
    mask: Tensor,
    segments: Segments,
    settings: Weights,
    divisor: Tensor | None,
) -> dict[str, float]:
    """``ratio`` before and ``weights`` after cutting, both ``[tokens]`` or ``[S]`` as the level says."""
    root = f"{_ROOT}/weight"
    low = 1.0 / settings.high if settings.low is None else settings.low
    of_sequence = settings.level == "sequence"
    per_token = torch.where(mask, segments.spread(weights), 0) if of_sequence else weights
    metrics = spread_of(root, per_token, mask)

    def share(condition: Tensor) -> Tensor:
        """Of tokens, whatever the level."""
        spread = segments.spread(condition) if of_sequence else condition
        return masked_mean(spread.to(weights.dtype), mask)

    metrics[f"{root}/fraction_high"] = share(ratio > settings.high)
    metrics[f"{root}/fraction_low"] = share(ratio < low)
    metrics[f"{root}/effective_sample_size"] = effective_sample_size(per_token.double(), mask)
    if settings.low is not None:
        metrics[f"{root}/zeroed_ratio"] = share((ratio > settings.high) | (ratio < settings.low))
    if divisor is not None:
        metrics[f"{root}/normalization"] = divisor

    sequences = segments.count(mask) > 0
    sequence_weights = weights if of_sequence else segments.mean(weights, mask)
    sequence_ratios = ratio if of_sequence else segments.mean(ratio, mask)
    metrics |= spread_of(f"{root}/sequence", sequence_weights, sequences)
    deviation = torch.where(sequences, (sequence_weights - 1.0).abs(), 0)
    metrics[f"{root}/sequence/max_deviation"] = deviation.amax() if deviation.numel() else deviation.sum()
    for name, condition in (("high", sequence_ratios > settings.high), ("low", sequence_ratios < low)):
        metrics[f"{root}/sequence/fraction_{name}"] = masked_mean(condition.to(weights.dtype), sequences)
    return _floats(metrics)


def rule_metrics(rule: Rejection, verdict: Verdict, out: Tensor, mask: Tensor, segments: Segments) -> dict[str, float]:
    """What a rejection rule saw and did; ``out [tokens]`` are the masked tokens it leaves out."""
    root = f"{_ROOT}/rejection/{rule.name}"
    sequences = segments.count(mask) > 0
    counted = mask if rule.over == "token" else sequences
    dtype = verdict.value.dtype
    metrics = spread_of(root, verdict.value, counted)
    metrics[f"{root}/fraction_high"] = masked_mean(verdict.above.to(dtype), counted)
    metrics[f"{root}/fraction_low"] = masked_mean(verdict.below.to(dtype), counted)
    metrics[f"{root}/masked_ratio"] = masked_mean(out.to(dtype), mask)
    metrics[f"{root}/masked_sequence_ratio"] = masked_mean((segments.count(out) > 0).to(dtype), sequences)
    return _floats(metrics)


@torch.no_grad()
def agreement_metrics(
    trainer_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor, segments: Segments
) -> dict[str, float]:
    """The ``mismatch/...`` metrics: do trainer and engine give the same tokens the same probability?

    For tokens made entirely under the trainer's present weights, so that any difference is numerical. All ``[tokens]``.
    """
    trainer = torch.where(mask, trainer_log_probs, 0).double()
    engine = torch.where(mask, engine_log_probs, 0).double()
    log_ratio = trainer - engine
    clamped = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    probability = spread_of("mismatch/probability", (trainer.exp() - engine.exp()).abs(), mask)
    log_prob = spread_of("mismatch/log_prob", log_ratio.abs(), mask)
    p = torch.where(mask, trainer.exp() - masked_mean(trainer.exp(), mask), 0)
    q = torch.where(mask, engine.exp() - masked_mean(engine.exp(), mask), 0)
    scale = (p.square().sum() * q.square().sum()).sqrt()
    whole = segments.sum(log_ratio, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return _floats(
        {
            "mismatch/tokens": mask.sum(),
            "mismatch/log_prob/mean": log_prob["mismatch/log_prob/mean"],
            "mismatch/log_prob/max": log_prob["mismatch/log_prob/max"],
            "mismatch/probability/mean": probability["mismatch/probability/mean"],
            "mismatch/probability/max": probability["mismatch/probability/max"],
            "mismatch/probability/std": probability["mismatch/probability/std"],
            "mismatch/correlation": torch.where(scale > 0, (p * q).sum() / scale.clamp(min=1e-300), 1.0),
            "mismatch/kl": masked_mean(torch.expm1(clamped) - clamped, mask),
            "mismatch/effective_sample_size": effective_sample_size(whole, segments.count(mask) > 0),
        }
    )
