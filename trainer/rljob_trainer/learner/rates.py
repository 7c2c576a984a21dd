"""The learning rate as a function of the number of updates (policy versions) done, not of optimizer steps: all
mini-batches of one update share it.
"""

from __future__ import annotations

import math

from rljob_trainer.learner.settings import OptimizerSettings


def learning_rate(settings: OptimizerSettings, update: int, total_updates: int | None) -> float:
    """The rate of update number ``update`` (from 0): linear warm-up to the peak, then the schedule.

    The first of ``warmup_steps`` updates has 1 / warmup_steps of the peak, none has 0. ``cosine`` and ``linear`` fall
    from the peak, right after the warm-up, to ``min_learning_rate_ratio`` of it at the last of ``total_updates``
    and stay there.
    """
    peak = settings.learning_rate
    if update < settings.warmup_steps:
        return peak * (update + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    if total_updates is None:
        raise ValueError(f"the {settings.schedule} schedule needs the number of steps: set stop.steps")
    length = max(1, total_updates - 1 - settings.warmup_steps)
    progress = min(1.0, (update - settings.warmup_steps) / length)
    falling = 0.5 * (1.0 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1.0 - progress
    floor = settings.min_learning_rate_ratio
    return peak * (floor + (1.0 - floor) * falling)
