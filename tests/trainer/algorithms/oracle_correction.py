"""Rollout correction in plain Python: weights, rejection rules and diagnostics, one token and one sequence at a time.

A sequence is the list of its unmasked tokens; ``logs`` are l = log pi_old - log pi_roll.
"""

from __future__ import annotations

import math

Rows = list[list[float]]


def clip(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def log_ratios(old: Rows, rollout: Rows) -> Rows:
    return [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(old, rollout, strict=True)]


def weights(logs: Rows, level: str, low: float | None, high: float, normalize: bool, clamp: bool = False) -> Rows:
    """Cut at ``high``; with a lower bound IcePop (arXiv 2510.18855), or with ``clamp`` max(low, min(w, high))."""

    def cut(w: float) -> float:
        if low is None or clamp:
            return max(low or 0.0, min(w, high))
        return w if low <= w <= high else 0.0

    if level == "token":
        result = [[cut(math.exp(clip(x))) for x in row] for row in logs]
        divisor = mean([w for row in result for w in row])
    else:
        of_sequence = [cut(math.exp(clip(math.fsum(row)))) for row in logs]
        result = [[w] * len(row) for w, row in zip(of_sequence, logs, strict=True)]
        divisor = mean([w for w, row in zip(of_sequence, logs, strict=True) if row])
    return [[w / divisor for w in row] for row in result] if normalize and divisor > 0 else result


def statistic(kind: str, x: float) -> float:
    x = clip(x)
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind]


def kept(logs: Rows, kind: str, over: str, low: float | None, high: float) -> list[list[bool]]:
    """True where the rule lets a token pass."""
    bottom = (math.log(1 / high if low is None else low)) if kind == "k1" else -math.inf
    top = math.log(high) if kind == "k1" else high

    def inside(value: float) -> bool:
        return bottom <= value <= top

    result = []
    for row in logs:
        values = [statistic(kind, x) for x in row]
        if over == "token":
            result.append([inside(v) for v in values])
        elif over == "sequenceMax":
            result.append([all(inside(v) for v in values)] * len(row))
        else:
            total = math.fsum(values)
            result.append([inside(total if over == "sequenceSum" else total / max(len(row), 1))] * len(row))
    return result


def divergence(kind: str, old: float, rollout: float) -> float:
    """arXiv 2602.04879, binary approximation: D(mu, pi) between "the sampled token" and "any other"; mu has sampled."""
    mu, pi = math.exp(rollout), math.exp(old)
    if kind == "tv":
        return abs(mu - pi)
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def kept_by_divergence(old: Rows, rollout: Rows, kind: str, over: str, high: float) -> list[list[bool]]:
    result = []
    for xs, ys in zip(old, rollout, strict=True):
        values = [divergence(kind, x, y) for x, y in zip(xs, ys, strict=True)]
        if over == "token":
            result.append([v <= high for v in values])
        else:
            total = {
                "sequenceSum": math.fsum(values),
                "sequenceMean": mean(values),
                "sequenceMax": max(values, default=0),
            }
            result.append([total[over] <= high] * len(values))
    return result


def diagnostics(old: Rows, rollout: Rows) -> dict[str, float]:
    """Definitions of the metric catalogue; sequences without tokens do not count."""
    logs = log_ratios(old, rollout)
    training = [-mean(row) for row in old if row]
    sampled = [-mean(row) for row in rollout if row]
    gaps = [a - b for a, b in zip(training, sampled, strict=True)]
    tokens = [x for row in logs for x in row]
    return {
        "perplexity/training": mean([math.exp(x) for x in training]),
        "perplexity/rollout": mean([math.exp(x) for x in sampled]),
        "perplexity/ratio": mean([math.exp(x) for x in gaps]),
        "log_perplexity/training": mean(training),
        "log_perplexity/rollout": mean(sampled),
        "log_perplexity/absolute_difference": mean([abs(x) for x in gaps]),
        "log_perplexity/difference/mean": mean(gaps),
        "log_perplexity/difference/max": max(gaps, default=0.0),
        "log_perplexity/difference/min": min(gaps, default=0.0),
        "kl": mean([-x for x in tokens]),
        "k3_kl": mean([statistic("k3", x) for x in tokens]),
        "chi2_token": mean([math.exp(2 * clip(x)) - 1 for x in tokens]),
        "chi2_sequence": mean([math.exp(2 * clip(math.fsum(row))) - 1 for row in logs if row]),
    }


def spread(values: list[float]) -> dict[str, float]:
    centre = mean(values)
    return {
        "mean": centre,
        "min": min(values, default=0.0),
        "max": max(values, default=0.0),
        "std": math.sqrt(mean([(v - centre) ** 2 for v in values])),
    }


def share(flags: list[bool]) -> float:
    return mean([float(f) for f in flags])


def named(root: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{root}/{name}": value for name, value in values.items()}


def weight_diagnostics(logs: Rows, level: str, low: float | None, high: float, normalize: bool) -> dict[str, float]:
    """Weights as they multiply the loss; the shares beyond the bounds are of ratios before they are cut."""
    tokens = [w for row in weights(logs, level, low, high, normalize) for w in row]
    uncut = weights(logs, level, low, high, False)
    if level == "token":
        ratios = [[math.exp(clip(x)) for x in row] for row in logs if row]
        used = [w for row in uncut for w in row]
        of_sequences = [mean(row) for row in ratios]
    else:
        ratios = [[math.exp(clip(math.fsum(row)))] * len(row) for row in logs if row]
        used = [row[0] for row in uncut if row]
        of_sequences = [row[0] for row in ratios]
    bottom = 1 / high if low is None else low
    divisor = (mean(used) or 1.0) if normalize else 1.0
    sequences = [mean(row) / divisor for row in uncut if row]
    flat = [r for row in ratios for r in row]
    square = mean([w * w for w in tokens])
    result = named("weight", spread(tokens)) | named("weight/sequence", spread(sequences))
    result |= {
        "weight/fraction_high": share([r > high for r in flat]),
        "weight/fraction_low": share([r < bottom for r in flat]),
        "weight/effective_sample_size": mean(tokens) ** 2 / square if square else 1.0,
        "weight/sequence/max_deviation": max((abs(w - 1) for w in sequences), default=0.0),
        "weight/sequence/fraction_high": share([r > high for r in of_sequences]),
        "weight/sequence/fraction_low": share([r < bottom for r in of_sequences]),
    }
    if low is not None:
        result["weight/zeroed_ratio"] = share([not low <= r <= high for r in flat])
    if normalize:
        result["weight/normalization"] = divisor
    return result


def rejection_diagnostics(logs: Rows, kind: str, over: str, low: float | None, high: float) -> dict[str, float]:
    """What a rule looked at, tokens or sequences with a token, and how many of these lay beyond which bound."""
    bottom = (math.log(1 / high if low is None else low) if low != 0 else -math.inf) if kind == "k1" else -math.inf
    top = math.log(high) if kind == "k1" else high
    rows = [[statistic(kind, x) for x in row] for row in logs if row]
    if over == "token":
        rows = [[v] for row in rows for v in row]
    seen = [
        {
            "token": math.fsum(row),
            "sequenceSum": math.fsum(row),
            "sequenceMean": mean(row),
            "sequenceMax": max(row, key=lambda v: (abs(v), v)),
        }[over]
        for row in rows
    ]
    of_sequences = named("sequence", sequence_diagnostics(logs, kind, bottom, top)) if over == "token" else {}
    whole = [[v] for v in seen] if over != "sequenceMax" else rows
    above, below = [any(v > top for v in row) for row in whole], [any(v < bottom for v in row) for row in whole]
    return spread(seen) | {"fraction_high": share(above), "fraction_low": share(below)} | of_sequences


def sequence_diagnostics(logs: Rows, kind: str, bottom: float, top: float) -> dict[str, float]:
    """The same of each sequence's mean, for a rule that looks at tokens; equal policies have the value 0."""
    means = [mean([statistic(kind, x) for x in row]) for row in logs if row]
    return spread(means) | {
        "max_deviation": max((abs(v) for v in means), default=0.0),
        "fraction_high": share([v > top for v in means]),
        "fraction_low": share([v < bottom for v in means]),
    }
