"""Losses that hold the policy near its anchor by a smooth function of the ratio instead of a clip."""

from __future__ import annotations

import torch

from rljob_trainer.algorithms.policy_losses import PolicyInputs, PolicyLossOutput, policy_loss, ratio_metrics


@policy_loss("sapo", aggregation="seqMeanTokenMean")
def sapo(inputs: PolicyInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> PolicyLossOutput:
    """-A 4 / tau sigmoid(tau (rho - 1)), tau = tau_positive where A > 0, else tau_negative (arXiv 2511.20347).

    At rho = 1 the gradient is that of the policy gradient; it fades as rho leaves 1.
    """
    positive = torch.as_tensor(tau_positive, dtype=inputs.ratio.dtype, device=inputs.ratio.device)
    tau = torch.where(inputs.advantages > 0, positive, tau_negative)
    gate = torch.sigmoid(tau * (inputs.ratio - 1.0)) * (4.0 / tau)
    return PolicyLossOutput(-inputs.advantages * gate, ratio_metrics(inputs))


@policy_loss("dro")
def dro(inputs: PolicyInputs, *, beta: float = 0.1) -> PolicyLossOutput:
    """-(A log pi - beta / 2 (log rho)^2): direct reward optimisation's quadratic tie to the anchor (arXiv 2405.19107).

    There is no exponential here, so the log-ratio is not clamped.
    """
    loss = 0.5 * beta * inputs.log_ratio.square() - inputs.advantages * inputs.log_probs
    return PolicyLossOutput(loss, ratio_metrics(inputs))
