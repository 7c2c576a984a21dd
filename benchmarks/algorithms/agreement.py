"""Whether both sides computed the same: streams token by token, metrics by name, where the definitions agree."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.algorithms.ours import Result
from benchmarks.algorithms.workload import Workload

TOLERANCE = 1e-3
"""Of a stream's largest value, and of a metric or 1e-3, whichever is more: float32 sums over millions of tokens."""

ROOT = "rollout_correction"
DIAGNOSTICS = {
    f"rollout_corr/{theirs}": f"{ROOT}/{ours}"
    for theirs, ours in {
        "training_ppl": "perplexity/training",
        "rollout_ppl": "perplexity/rollout",
        "ppl_ratio": "perplexity/ratio",
        "training_log_ppl": "log_perplexity/training",
        "rollout_log_ppl": "log_perplexity/rollout",
        "log_ppl_diff": "log_perplexity/difference/mean",
        "log_ppl_diff_max": "log_perplexity/difference/max",
        "log_ppl_diff_min": "log_perplexity/difference/min",
        "log_ppl_abs_diff": "log_perplexity/absolute_difference",
        "kl": "kl",
        "k3_kl": "k3_kl",
        "chi2_token": "chi2_token",
        "chi2_seq": "chi2_sequence",
        "rollout_is_mean": "weight/mean",
        "rollout_is_std": "weight/std",
        "rollout_is_eff_sample_size": "weight/effective_sample_size",
        "rollout_is_seq_mean": "weight/sequence/mean",
        "rollout_is_seq_max": "weight/sequence/max",
        "rollout_is_seq_min": "weight/sequence/min",
        "rollout_is_seq_max_deviation": "weight/sequence/max_deviation",
        "rollout_rs_masked_fraction": "rejection/masked_ratio",
        "rollout_rs_seq_masked_fraction": "rejection/masked_sequence_ratio",
    }.items()
}
OF_TOKENS = {
    f"rollout_corr/{theirs}": f"{ROOT}/{ours}"
    for theirs, ours in {
        "rollout_is_max": "weight/max",
        "rollout_is_min": "weight/min",
        "rollout_is_ratio_fraction_high": "weight/fraction_high",
        "rollout_is_ratio_fraction_low": "weight/fraction_low",
        "rollout_rs_seq_mean_k3_seq_mean": "rejection/sequence_mean_k3/mean",
        "rollout_rs_seq_mean_k3_max": "rejection/sequence_mean_k3/max",
        "rollout_rs_seq_mean_k3_fraction_high": "rejection/sequence_mean_k3/fraction_high",
    }.items()
}
OF_SEQUENCES = {
    f"rollout_corr/{theirs}": f"{ROOT}/{ours}"
    for theirs, ours in {
        "rollout_rs_seq_max_k2_seq_mean": "rejection/sequence_max_k2/mean",
        "rollout_rs_seq_max_k2_max": "rejection/sequence_max_k2/max",
        "rollout_rs_seq_max_k2_fraction_high": "rejection/sequence_max_k2/fraction_high",
    }.items()
}
METRICS = {
    "correction_of_tokens": DIAGNOSTICS | OF_TOKENS,
    "correction_of_sequences": DIAGNOSTICS | OF_SEQUENCES,
    "policy_loss": {
        "loss": "actor/policy_loss",
        "actor/pg_clipfrac": "actor/clip_fraction",
        "actor/pg_clipfrac_lower": "actor/dual_clip_fraction",
        "actor/ppo_kl": "actor/approx_kl",
    },
}


class DisagreementError(RuntimeError):
    """Two sides that should compute the same do not."""


def deviations(case: str, ours: Result, theirs: Result, workload: Workload) -> dict[str, float]:
    """The largest relative deviation by name. Raises ``DisagreementError`` when one is above the tolerance.

    Streams are compared at kept tokens (what the other side leaves at masked ones is not the same, and unused).
    """
    kept = workload.packed.mask
    found = {}
    for name, stream in ours[0].items():
        reference = theirs[0][name][workload.real][kept]
        found[name] = _deviation(stream[kept], reference)
    for theirs_name, ours_name in METRICS.get(case, {}).items():
        reference = torch.tensor([theirs[1][theirs_name]])
        found[ours_name] = _deviation(torch.tensor([ours[1][ours_name]]), reference)
    bad = {name: value for name, value in found.items() if not value <= TOLERANCE}
    if bad:
        raise DisagreementError(f"{case}: the sides differ by more than {TOLERANCE:g} in {bad}")
    return found


def _deviation(ours: Tensor, theirs: Tensor) -> float:
    scale = theirs.double().abs().max().clamp(min=1e-3)
    return float((ours.double() - theirs.double()).abs().max() / scale)
