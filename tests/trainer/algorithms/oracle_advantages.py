"""Advantage estimators in plain Python, straight from their papers: loops over sequences, groups and tokens.

Written against the equations, not against the code under test. A sequence is the list of its unmasked tokens.
"""

from __future__ import annotations

import math

Rows = list[list[float]]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def sample_std(values: list[float]) -> float:
    """Bessel-corrected; 0 for one value."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


def whiten(rows: Rows, epsilon: float = 1e-8) -> Rows:
    everything = [v for row in rows for v in row]
    if not everything:
        return rows
    centre, width = mean(everything), sample_std(everything)
    return [[(v - centre) / math.sqrt(width**2 + epsilon) for v in row] for row in rows]


def token_rewards(scores: list[float], counts: list[int]) -> Rows:
    """The score at the last token."""
    return [[0.0] * (n - 1) + [score] if n else [] for score, n in zip(scores, counts, strict=True)]


def gae(rewards: Rows, values: Rows, beyond: list[float], gamma: float, lam: float) -> tuple[Rows, Rows]:
    """arXiv 1506.02438: A_t = sum_l (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t.

    ``beyond`` is V after the last token. Returns advantages and value targets A + V.
    """
    advantages: Rows = []
    for r, v, after in zip(rewards, values, beyond, strict=True):
        following = [*v[1:], after]
        delta = [r[t] + gamma * following[t] - v[t] for t in range(len(r))]
        advantages.append(
            [math.fsum((gamma * lam) ** (s - t) * delta[s] for s in range(t, len(r))) for t in range(len(r))]
        )
    targets = [[a + x for a, x in zip(row, v, strict=True)] for row, v in zip(advantages, values, strict=True)]
    return advantages, targets


def returns(rewards: Rows, gamma: float) -> Rows:
    """G_t = sum_s gamma^(s - t) r_s."""
    return [[math.fsum(gamma ** (s - t) * r[s] for s in range(t, len(r))) for t in range(len(r))] for r in rewards]


def members(groups: list[int], i: int) -> list[int]:
    return [j for j, g in enumerate(groups) if g == groups[i]]


def grpo(rewards: list[float], groups: list[int], by_std: bool, epsilon: float) -> list[float]:
    """arXiv 2402.03300, 4.1.2 (with std); arXiv 2503.20783 (without)."""
    result = []
    for i, r in enumerate(rewards):
        group = [rewards[j] for j in members(groups, i)]
        result.append((r - mean(group)) / (sample_std(group) + epsilon if by_std else 1.0))
    return result


def grpo_passk(rewards: list[float], groups: list[int], by_std: bool, epsilon: float) -> list[float]:
    """arXiv 2503.19595: the best sample gets r_best - r_second, everybody else nothing."""
    result = []
    for i, r in enumerate(rewards):
        group = members(groups, i)
        ranked = sorted((rewards[j] for j in group), reverse=True)
        best = min(j for j in group if rewards[j] == ranked[0])
        width = sample_std([rewards[j] for j in group]) + epsilon if by_std else 1.0
        result.append((r - ranked[1]) / width if i == best and len(group) > 1 else 0.0)
    return result


def rloo(rewards: list[float], groups: list[int]) -> list[float]:
    """arXiv 2402.14740: the baseline of a sample is the mean of the others."""
    result = []
    for i, r in enumerate(rewards):
        others = [rewards[j] for j in members(groups, i) if j != i]
        result.append(r - mean(others) if others else 0.0)
    return result


def opo(rewards: list[float], groups: list[int], counts: list[int]) -> list[float]:
    """arXiv 2505.23585: baseline = sum of length times reward over sum of lengths."""
    result = []
    for i, r in enumerate(rewards):
        group = members(groups, i)
        total = sum(counts[j] for j in group)
        baseline = math.fsum(counts[j] * rewards[j] for j in group) / total if total else 0.0
        result.append(r - baseline)
    return result


def gpg(rewards: list[float], groups: list[int]) -> list[float]:
    """arXiv 2504.02546: centred rewards, scaled by batch size over the number of samples with a reward."""
    scale = len(rewards) / max(1, sum(r != 0 for r in rewards))
    return [scale * (r - mean([rewards[j] for j in members(groups, i)])) for i, r in enumerate(rewards)]


def maxrl(rewards: list[float], groups: list[int], epsilon: float) -> list[float]:
    """arXiv 2602.02710: (r - mean) / mean."""
    result = []
    for i, r in enumerate(rewards):
        centre = mean([rewards[j] for j in members(groups, i)])
        result.append((r - centre) / (centre + epsilon))
    return result


def token_baseline(
    rewards: Rows,
    log_probs: Rows,
    squares: Rows,
    weights: Rows | None,
    positions: list[list[int]],
    groups: list[int],
    gamma: float,
    epsilon: float,
) -> Rows:
    """arXiv 2602.07078: B_t = sum_i G_it W_it / sum_i W_it over the group's sequences that have a token at position t.

    W_it = sum_{j <= t} (1 - 2 pi_j + sum_v pi_v^2). A sequence alone at its position has no baseline.
    """
    gains = returns(rewards, gamma)
    energies: Rows = []
    for i, row in enumerate(log_probs):
        total, energy = 0.0, []
        for t, lp in enumerate(row):
            step = 1 - 2 * math.exp(lp) + squares[i][t]
            total += step * (weights[i][t] ** 2 if weights else 1.0)
            energy.append(total)
        energies.append(energy)
    result: Rows = []
    for i in range(len(rewards)):
        row = []
        for t, position in enumerate(positions[i]):
            peers = [(j, positions[j].index(position)) for j in members(groups, i) if position in positions[j]]
            baseline = 0.0
            if len(peers) > 1:
                top = math.fsum(gains[j][s] * energies[j][s] for j, s in peers)
                baseline = top / (math.fsum(energies[j][s] for j, s in peers) + epsilon)
            row.append(gains[i][t] - baseline)
        result.append(row)
    return result


def broadcast(values: list[float], counts: list[int]) -> Rows:
    return [[v] * n for v, n in zip(values, counts, strict=True)]
