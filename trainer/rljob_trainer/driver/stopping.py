"""When a run is over: the conditions of ``spec.stop``, of which the first to hold ends it."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.spec.pipeline import Stop


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands at a step's boundary, over all restarts."""

    step: int
    samples: int
    seconds: float
    reward: float | None
    """The mean validation score where there is one, else the step's mean training score."""


def reason_to_stop(stop: Stop, progress: Progress) -> str | None:
    """A sentence that says which condition holds, or None. Epochs are counted by the feed, which runs dry."""
    if stop.steps is not None and progress.step >= stop.steps:
        return f"{progress.step} of {stop.steps} steps are done"
    if stop.samples is not None and progress.samples >= stop.samples:
        return f"{progress.samples} of {stop.samples} samples are trained"
    if stop.reward is not None and progress.reward is not None and progress.reward >= stop.reward:
        return f"the reward reached {progress.reward:.3f} (stop.reward is {stop.reward:g})"
    if stop.seconds is not None and progress.seconds >= stop.seconds:
        return f"{progress.seconds:.0f} s of training are over (stop.seconds is {stop.seconds})"
    return None
