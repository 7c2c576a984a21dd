"""How much of the policy gradient is signal, without a backward pass per sample.

A sample's squared gradient norm is taken to be A_i^2 W_i: A_i the mean of its advantages, W_i the squared norm that the
gradients of its log-probs by the logits add up to (the weight of the optimal token baseline, arXiv 2602.07078).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rljob_trainer.algorithms.estimators import AdvantageInputs
from rljob_trainer.algorithms.token_baselines import token_energy


@torch.no_grad()
def gradient_noise(inputs: AdvantageInputs, advantages: Tensor, gradient_norm: float) -> dict[str, float]:
    """The ``variance/...`` metrics of a batch whose mean gradient has the norm ``gradient_norm`` (before clipping).

    ``advantages [tokens]``; ``inputs`` with ``log_probs`` and ``sum_squared_probs``. Sequences without masked tokens do
    not count. Signal is the squared norm of the mean gradient, total power the mean of A_i^2 W_i, and their difference
    over the number of samples less one the noise of the mean (0 for a single sample).
    """
    segments, mask = inputs.segments, inputs.mask
    present = segments.count(mask) > 0
    weight = segments.sum(token_energy(inputs), mask)[present]
    squared = segments.mean(advantages.double(), mask)[present].square()
    count = weight.numel()
    if count == 0:
        return {}
    signal, power = gradient_norm**2, float((squared * weight).mean())
    return {
        "variance/signal_strength": signal,
        "variance/total_power": power,
        "variance/pure_noise": (power - signal) / (count - 1) if count > 1 else 0.0,
        "variance/squared_advantage": float(squared.mean()),
        "variance/weight": float(weight.mean()),
    }
