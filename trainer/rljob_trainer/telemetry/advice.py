"""What the measured waits of a run say about the sizes of its pools: which one holds the other up, and what to move.

The two pools work at the same time at best, so a step takes as long as the slower one alone; whoever waits for the
other could take that share off a step if the other were faster. Rollout and training are taken to speed up in
proportion to their engines and ranks: a bound of the gain, not a forecast (``rljob plan`` simulates one).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rljob_trainer.telemetry.figures import percent

WORTH_SAYING = 0.1
"""Waits below this share of the time are not worth a change."""
_LEAST_WORK = 0.01
"""Nobody is told of more than a hundredfold gain: a pool that did nothing at all was not measured."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Shares of the recent past, between 0 and 1, and the pools they were measured with."""

    trainer_idle: float
    """The trainer waits for samples."""
    rollout_idle: float
    """An engine has no request, mean over engines."""
    engines: int
    ranks: int


def advice(mode: Literal["sync", "oneStepOff", "fullyAsync"], waiting: Waiting, *, colocated: bool) -> str | None:
    """One or two sentences with the bottleneck, the change and the most it can gain; None when nothing is worth it.

    Pools that share devices take turns by design: there is nothing to move between them.
    """
    trainer, rollout = waiting.trainer_idle, waiting.rollout_idle
    if colocated or max(trainer, rollout) < WORTH_SAYING:
        return None
    if mode == "sync":
        gain = 1.0 / max(trainer, 1.0 - trainer)
        if gain < 1.0 + WORTH_SAYING:
            return None
        return (
            f"The pools take turns: the trainer waits {percent(trainer)} of the time. "
            f"With pipeline.mode: oneStepOff both work at once, which is up to {gain:.2f} times as fast."
        )
    if mode == "fullyAsync" and min(trainer, rollout) >= WORTH_SAYING:
        return (
            f"Both pools wait: the trainer {percent(trainer)} of the time, engines {percent(rollout)}. Slow tools or "
            "reward functions delay groups: set pipeline.staleness.onDeadline: end to train on late groups as they "
            "are, or raise staleness.maxAge to give them more time."
        )
    if trainer >= rollout:
        gain = 1.0 / max(1.0 - trainer, _LEAST_WORK)
        wanted = math.ceil(waiting.engines * gain - 1e-9)
        return (
            f"Rollout is the bottleneck: the trainer waits {percent(trainer)} of the time. "
            f"rollout.replicas: {max(wanted, waiting.engines + 1)} instead of {waiting.engines} would keep it busy, "
            f"up to {gain:.2f} times as fast."
        )
    needed = max(1, math.ceil(waiting.engines * (1.0 - rollout) - 1e-9))
    spare = waiting.engines - needed
    bottleneck = f"The trainer is the bottleneck: engines are idle {percent(rollout)} of the time. "
    if spare == 0:
        return bottleneck + "More trainer ranks would shorten a step."
    gain = min((waiting.ranks + spare) / waiting.ranks, 1.0 / max(1.0 - rollout, _LEAST_WORK))
    return bottleneck + (
        f"rollout.replicas: {needed} instead of {waiting.engines} is enough; with the devices of the other {spare}, "
        f"the trainer would be up to {gain:.2f} times as fast."
    )
