"""Ranks' reports become the metrics of a step, under the names of ``telemetry/catalogue.py``.

Shares add up over data indices; the sums of each optimizer step are then averaged over the steps that were taken. Of
extremes (names that end in /max or /min) the largest or smallest over both is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rljob_trainer.learner.protocol import SequenceBatch, UpdateResult
from rljob_trainer.learner.usage import Usage
from rljob_trainer.learner.work import Cut, RankReport, StepReport


def update_result(reports: Sequence[RankReport], work: Cut, batch: SequenceBatch) -> UpdateResult:
    """``reports`` of all ranks after one update with ``work``, which ``batch`` was cut into."""
    metrics: dict[str, float] = {}
    skipped: list[str] = []
    outputs = work.returned(reports)
    taken = {"actor": 0, "critic": 0}
    for model, rate in reports[0].rates.items():
        steps = [
            {name: _joined(name, [p.sums[name] for p in parts if name in p.sums], 1) for name in _names(parts)}
            | {"grad_norm": parts[0].grad_norm}
            for parts in zip(*(_of(report, model) for report in outputs), strict=True)
            if all(part.problem is None for part in parts)
        ]
        refused = [
            (parts[0].mini_batch, next(p.problem for p in parts if p.problem is not None))
            for parts in zip(*(_of(report, model) for report in reports), strict=True)
            if any(part.problem is not None for part in parts)
        ]
        skipped += [f"{model}, mini-batch {number}: {problem}; step skipped" for number, problem in refused]
        taken[model] = len(steps)
        metrics[f"{model}/learning_rate"] = rate
        metrics[f"{model}/steps"] = len(steps)
        metrics[f"{model}/skipped_steps"] = len(refused)
        if steps:
            metrics[f"{model}/grad_norm"] = math.fsum(s["grad_norm"] for s in steps) / len(steps)
            metrics[f"{model}/grad_norm/max"] = max(s["grad_norm"] for s in steps)
            metrics.update(_means(model, steps))
    metrics.update(_balance(work.tokens))
    metrics.update(reports[0].loads)
    metrics.update(usage_metrics([report.usage for report in reports]))
    parts = [report.first_log_probs for report in outputs if report.first_log_probs is not None]
    first = work.merge(batch, parts, only=0) if parts else None
    # What one rank's part of a parameter lacks, others may have.
    notes = [note for note in reports[0].notes if all(note in report.notes for report in reports)]
    return UpdateResult(
        metrics,
        taken["actor"],
        taken["critic"],
        skipped,
        first,
        notes,
        grad_norm=metrics.get("actor/grad_norm"),
        entropy=metrics.get("actor/entropy"),
    )


def usage_metrics(ranks: Sequence[Usage]) -> dict[str, float]:
    """What a call cost: seconds of the slowest rank, the fullest device, host memory of all ranks together."""
    stages = dict.fromkeys(stage for usage in ranks for stage in usage.seconds)
    metrics = {f"timing/{stage}_seconds": max(u.seconds.get(stage, 0.0) for u in ranks) for stage in stages}
    if any(usage.device_allocated for usage in ranks):
        metrics["memory/device_allocated_gigabytes"] = max(usage.device_allocated for usage in ranks) / 1e9
        metrics["memory/device_reserved_gigabytes"] = max(usage.device_reserved for usage in ranks) / 1e9
    if any(usage.host for usage in ranks):
        metrics["memory/host_gigabytes/trainer"] = sum(usage.host for usage in ranks) / 1e9
    return metrics


def _means(model: str, steps: list[dict[str, float]]) -> dict[str, float]:
    names = {name for step in steps for name in step if name != "grad_norm" and not name.startswith("moment/")}
    means = {name: _joined(name, [s[name] for s in steps if name in s], len(steps)) for name in sorted(names)}
    if model == "critic":
        variance = _explained_variance(steps)
        if variance is not None:
            means["critic/explained_variance"] = variance
    return means


def _joined(name: str, values: Sequence[float], parts: int) -> float:
    """A sum over ``parts`` of it, or an extreme."""
    if name.endswith("/max"):
        return max(values)
    return min(values) if name.endswith("/min") else math.fsum(values) / parts


def _explained_variance(steps: list[dict[str, float]]) -> float | None:
    """1 - var(return - value) / var(return) over all tokens of the update; None where all returns are equal."""
    total = {
        name: math.fsum(s.get(f"moment/{name}", 0.0) for s in steps)
        for name in ("count", "return", "return_squared", "error", "error_squared")
    }
    if total["count"] < 1:
        return None
    of_return = total["return_squared"] / total["count"] - (total["return"] / total["count"]) ** 2
    of_error = total["error_squared"] / total["count"] - (total["error"] / total["count"]) ** 2
    if of_return <= 1e-12 * max(1.0, total["return_squared"] / total["count"]):
        return None
    return 1.0 - of_error / of_return


def _balance(tokens: Sequence[int]) -> dict[str, float]:
    return {
        "balance/rank_tokens/mean": sum(tokens) / len(tokens),
        "balance/rank_tokens/min": float(min(tokens)),
        "balance/rank_tokens/max": float(max(tokens)),
        "balance/rank_tokens/spread": float(max(tokens) - min(tokens)),
    }


def _of(report: RankReport, model: str) -> list[StepReport]:
    return [step for step in report.steps if step.model == model]


def _names(parts: Sequence[StepReport]) -> list[str]:
    return list({name: None for part in parts for name in part.sums})
