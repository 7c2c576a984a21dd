"""When a run is over: the conditions of ``spec.stop`` and the steps that the caller allows, whichever holds first."""

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


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of one run of a job."""

    stop: Stop
    steps: int | None = None
    """Steps after which this run ends, if the job is longer: its learning rates fall until the job's own end."""

    @property
    def total_steps(self) -> int | None:
        """The last step there can be; None: other conditions end the run."""
        return min((steps for steps in (self.stop.steps, self.steps) if steps is not None), default=None)

    def reason(self, progress: Progress) -> str | None:
        """A sentence that says which condition holds, or None. Epochs are counted by the feed, which runs dry."""
        stop, steps = self.stop, self.total_steps
        if steps is not None and progress.step >= steps:
            return f"{progress.step} of {steps} steps are done"
        if stop.samples is not None and progress.samples >= stop.samples:
            return f"trained on {progress.samples} of {stop.samples} samples"
        if stop.reward is not None and progress.reward is not None and progress.reward >= stop.reward:
            return f"the reward reached {progress.reward:.3f} (stop.reward is {stop.reward:g})"
        if stop.seconds is not None and progress.seconds >= stop.seconds:
            return f"trained for {progress.seconds:.0f} s (stop.seconds is {stop.seconds})"
        return None
