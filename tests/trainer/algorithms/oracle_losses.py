"""Policy losses, value loss, KL and aggregation in plain Python, straight from their papers.

A policy loss is a function of one sequence's unmasked tokens. ``lp`` is what is differentiated; wherever a paper stops
the gradient the oracle reads ``sg`` (the same numbers, held fixed while finite differences move ``lp``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Rows = list[list[float]]


@dataclass
class Sequence:
    lp: list[float]
    sg: list[float]
    old: list[float]
    adv: list[float]
    rollout: list[float] = field(default_factory=list)
    selected: list[bool] = field(default_factory=list)

    def ratio(self, t: int) -> float:
        return math.exp(clip(self.lp[t] - self.old[t], -20, 20))

    def sg_ratio(self, t: int) -> float:
        return math.exp(clip(self.sg[t] - self.old[t], -20, 20))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def clipped(ratio: float, a: float, low: float, high: float, dual: float | None) -> float:
    """arXiv 1707.06347 (7): -min(rho A, clip(rho) A); arXiv 1912.09729: for A < 0 -max(that minimum, c A)."""
    objective = min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)
    if dual and a < 0:
        objective = max(objective, dual * a)
    return -objective


def ppo(s: Sequence, clip_low: float, clip_high: float, dual_clip: float | None = None) -> list[float]:
    return [clipped(s.ratio(t), a, clip_low, clip_high, dual_clip) for t, a in enumerate(s.adv)]


def bypass_ppo(s: Sequence, clip_low: float, clip_high: float, dual_clip: float | None = None) -> list[float]:
    """PPO whose anchor is the policy that sampled."""
    return ppo(Sequence(s.lp, s.sg, s.rollout, s.adv), clip_low, clip_high, dual_clip)


def gspo(s: Sequence, clip_low: float, clip_high: float) -> list[float]:
    """arXiv 2507.18071: s_i = (pi(y) / pi_old(y))^(1/|y|); token ratio sg(s_i) pi_t / sg(pi_t)."""
    if not s.lp:
        return []
    log_s = math.fsum(x - o for x, o in zip(s.sg, s.old, strict=True)) / len(s.lp)
    result = []
    for t, a in enumerate(s.adv):
        ratio = math.exp(clip(s.lp[t] - s.sg[t] + log_s, -20, 20))
        result.append(clipped(ratio, a, clip_low, clip_high, None))
    return result


def gmpo(s: Sequence, clip_low: float, clip_high: float) -> list[float]:
    """arXiv 2507.20673: the geometric mean of token ratios, each clipped in log space on the side that gains."""
    n = len(s.lp)
    if n == 0:
        return []
    logs = []
    for t, a in enumerate(s.adv):
        x = clip(s.lp[t] - s.old[t], -20, 20)
        sign = 1.0 if a >= 0 else -1.0
        logs.append(sign * min(sign * x, sign * clip(x, -clip_low, clip_high)))
    return [-(math.fsum(s.adv) / n) * math.exp(math.fsum(logs) / n)] * n


def sapo(s: Sequence, tau_positive: float, tau_negative: float) -> list[float]:
    """arXiv 2511.20347: gate sigma(tau (rho - 1)) 4 / tau."""
    result = []
    for t, a in enumerate(s.adv):
        tau = tau_positive if a > 0 else tau_negative
        x = tau * (s.ratio(t) - 1)
        sigmoid = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
        result.append(-a * sigmoid * 4 / tau)
    return result


def policy_gradient(s: Sequence) -> list[float]:
    return [-a * lp for a, lp in zip(s.adv, s.lp, strict=True)]


def cispo(s: Sequence, clip_low: float, clip_high: float) -> list[float]:
    """arXiv 2506.13585: -sg(clip(rho)) A log pi."""
    return [-clip(s.sg_ratio(t), 1 - clip_low, 1 + clip_high) * a * s.lp[t] for t, a in enumerate(s.adv)]


def tis(s: Sequence, ratio_cap: float) -> list[float]:
    """arXiv 1802.01561: weights truncated at a constant."""
    return [-min(s.sg_ratio(t), ratio_cap) * a * s.lp[t] for t, a in enumerate(s.adv)]


def dppo_tv(s: Sequence, clip_low: float, clip_high: float, ratio_cap: float) -> list[float]:
    """arXiv 2602.04879, binary total variation."""
    result = []
    for t, a in enumerate(s.adv):
        moved = math.exp(s.sg[t]) - math.exp(s.old[t])
        kept = moved <= clip_high if a > 0 else moved >= -clip_low
        result.append(-min(s.sg_ratio(t), ratio_cap) * a * s.lp[t] if kept else 0.0)
    return result


def dppo_kl(s: Sequence, divergence_low: float, divergence_high: float, ratio_cap: float) -> list[float]:
    """arXiv 2602.04879, binary KL(pi_old || pi); only steps away from it are stopped, each at its bound."""
    result = []
    for t, a in enumerate(s.adv):
        p, q = math.exp(s.old[t]), math.exp(s.sg[t])
        kl = p * (s.old[t] - s.sg[t]) + (1 - p) * math.log((1 - p) / (1 - q))
        away = q > p if a > 0 else q < p
        kept = kl <= (divergence_high if a > 0 else divergence_low) or not away
        result.append(-min(s.sg_ratio(t), ratio_cap) * a * s.lp[t] if kept else 0.0)
    return result


def dro(s: Sequence, beta: float) -> list[float]:
    """arXiv 2405.19107: -(log pi A - beta / 2 (log rho)^2)."""
    return [-(s.lp[t] * a - beta / 2 * (s.lp[t] - s.old[t]) ** 2) for t, a in enumerate(s.adv)]


def clip_cov(s: Sequence, clip_low: float, clip_high: float, dual_clip: float | None = None) -> list[float]:
    """arXiv 2505.22617: selected tokens are taken out of the gradient."""
    return [0.0 if s.selected[t] else loss for t, loss in enumerate(ppo(s, clip_low, clip_high, dual_clip))]


def kl_cov(s: Sequence, kl_coefficient: float) -> list[float]:
    """arXiv 2505.22617: selected tokens pay for moving."""
    return [
        -a * s.ratio(t) + (kl_coefficient * abs(s.lp[t] - s.old[t]) if s.selected[t] else 0.0)
        for t, a in enumerate(s.adv)
    ]


def bypass_reinforce(s: Sequence, level: str, low: float | None, high: float, clamp: bool = False) -> list[float]:
    """-w A log pi with w of the policy that sampled; IcePop (arXiv 2510.18855) when there is a lower bound, unless it
    clamps."""
    logs = [x - r for x, r in zip(s.sg, s.rollout, strict=True)]
    result = []
    for t, a in enumerate(s.adv):
        w = math.exp(clip(math.fsum(logs) if level == "sequence" else logs[t], -20, 20)) if level != "none" else 1.0
        if level != "none":
            outside = 0.0 if low is not None and not clamp else clip(w, low or 0.0, high)
            w = w if (low or 0.0) <= w <= high else outside
        result.append(-w * a * s.lp[t])
    return result


def covariances(log_probs: Rows, advantages: Rows) -> Rows:
    """arXiv 2505.22617: (A - mean A)(log pi - mean log pi)."""
    lps, advs = [v for r in log_probs for v in r], [v for r in advantages for v in r]
    if not lps:
        return [[] for _ in log_probs]
    centre_lp, centre_a = math.fsum(lps) / len(lps), math.fsum(advs) / len(advs)
    return [
        [(a - centre_a) * (x - centre_lp) for a, x in zip(ra, rx, strict=True)]
        for ra, rx in zip(advantages, log_probs, strict=True)
    ]


def aggregate(rows: Rows, kind: str, scale: float = 1.0, groups: list[int] | None = None) -> float:
    """``groups``: the prompt of each row, for promptMean (arXiv 2510.13786, section 4: the mean over prompts of
    1 / sum_g |y_g| sum_i sum_t)."""
    tokens = sum(len(r) for r in rows)
    filled = [r for r in rows if r]
    if not tokens:
        return 0.0
    total = math.fsum(v for r in rows for v in r)
    if kind == "promptMean":
        assert groups is not None
        prompts: dict[int, list[float]] = {}
        for group, row in zip(groups, rows, strict=True):
            prompts.setdefault(group, []).extend(row)
        means = [math.fsum(p) / len(p) for p in prompts.values() if p]
        return math.fsum(means) / len(means)
    return {
        "tokenMean": total / tokens,
        "tokenSum": total,
        "seqMeanTokenMean": math.fsum(math.fsum(r) / len(r) for r in filled) / len(filled),
        "seqMeanTokenSum": total / len(filled),
        "seqMeanTokenSumNorm": total / len(filled) / scale,
    }[kind]


def kl(kind: str, x: float, ref: float) -> float:
    """http://joschu.net/blog/kl-approx.html with r = pi_ref / pi, clamped as the documentation says."""
    d = x - ref
    if kind.startswith("k1"):
        return d
    if kind.startswith("abs"):
        return abs(d)
    if kind == "k2":
        return d * d / 2
    d = clip(d, -20, 20)
    return min(math.exp(-d) - 1 + d, 10.0)


def kl_in_loss(kind: str, x: float, sg: float, ref: float) -> float:
    """What is differentiated by x: the straight-through kinds move as k2 and stay where their own estimate is."""
    if not kind.endswith("Straight"):
        return kl(kind, x, ref)
    return kl(kind, sg, ref) + kl("k2", x, ref) - kl("k2", sg, ref)


def importance_weighted_kl(x: float, old: float, ref: float) -> float:
    """arXiv 2512.02556, section 3.1: pi / pi_old (pi_ref / pi - log(pi_ref / pi) - 1), differentiated as it stands."""
    pi, pi_old, pi_ref = math.exp(x), math.exp(old), math.exp(ref)
    return pi / pi_old * (pi_ref / pi - math.log(pi_ref / pi) - 1)


def value_loss(v: float, target: float, old: float, bound: float | None) -> float:
    """1/2 max((V - R)^2, (clip(V) - R)^2)."""
    plain = (v - target) ** 2
    if bound is None:
        return plain / 2
    return max(plain, (clip(v, old - bound, old + bound) - target) ** 2) / 2
